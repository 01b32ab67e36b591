// What is packed into the page, and small things that every other file uses.

const page = { data: null, plotly: null };

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text; // never innerHTML: names are somebody else's text
  return made;
}

function button(text, className, action) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

/** The bytes of a packed script element. */
async function unpacked(id) {
  const packed = document.getElementById(id);
  const text = atob(packed.textContent);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  packed.remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/** Plotly, unpacked once. The page's policy knows the hash of its text, so that this text and no other runs. */
function plotly() {
  page.plotly ??= unpacked("plotly-blob").then((bytes) => {
    const script = document.createElement("script");
    script.textContent = new TextDecoder().decode(bytes);
    document.head.append(script);
    script.remove();
    return window.Plotly;
  });
  return page.plotly;
}

function download(name, href) {
  const link = element("a");
  link.href = href;
  link.download = name;
  link.click();
}
