// Charts: drawn when they come into view, and again when the theme or the width changes.

const NARROW = 560;
const drawn = new Map();

/** A color of the current theme: Plotly cannot read CSS variables. */
function color(name) {
  const probe = element("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function template() {
  const [text, dim, line, panel] = ["text", "dim", "line", "panel"].map(color);
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line, spikecolor: dim,
    spikethickness: 1, spikedash: "solid", spikemode: "across", tickfont: { color: dim }, title: { font: { color: dim, size: 12 }, standoff: 8 } };
  const edge = { marker: { line: { color: panel, width: 1 } } };
  return {
    layout: {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: text },
      paper_bgcolor: panel, plot_bgcolor: panel, xaxis: axis, yaxis: axis,
      hoverlabel: { bgcolor: panel, bordercolor: dim, font: { color: text, size: 12 }, align: "left", namelength: -1 },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.01, yanchor: "bottom", font: { color: text }, bgcolor: "rgba(0,0,0,0)" },
      annotationdefaults: { font: { color: text, size: 12 }, bgcolor: panel, borderpad: 2 },
      shapedefaults: { line: { color: dim } },
      margin: { t: 8, l: 8, r: 16, b: 8 },
    },
    data: { icicle: [edge], treemap: [edge], bar: [{ error_x: { color: text } }] },
  };
}

function layoutFor(root, figure) {
  const layout = structuredClone(figure.layout);
  const isNarrow = root.clientWidth < NARROW;
  if (isNarrow) {
    for (const [path, value] of Object.entries(figure.narrow)) {
      const names = path.split(".");
      const last = names.pop();
      names.reduce((at, name) => (at[name] ??= {}), layout)[last] = value;
    }
  }
  for (const name of ["xaxis", "yaxis"]) if (layout[name]) layout[name].automargin = true;
  const width = Math.max(root.clientWidth, figure.min_width ?? 0);
  const dragmode = isNarrow ? false : "zoom"; // a finger scrolls the page
  return { ...layout, template: template(), showlegend: false, dragmode, width, height: figure.height };
}

function draw(root, figure, Plotly) {
  drawn.set(root, { figure, width: 0 }); // hidden: `sizes` draws it when it gets a width
  if (root.clientWidth === 0) return;
  root.querySelector("noscript")?.remove();
  const config = { displaylogo: false, displayModeBar: false, responsive: false, showTips: false };
  const data = figure.data.map((trace, number) => ({ ...trace, visible: !figure.hidden?.has(number) }));
  Plotly.react(root, data, layoutFor(root, figure), config);
  drawn.set(root, { figure, width: root.clientWidth });
  if (root.scrollWidth > root.clientWidth) root.tabIndex = 0; // a keyboard scrolls it too
}

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const known = drawn.get(target);
    if (known && target.clientWidth && known.width !== target.clientWidth) draw(target, known.figure, window.Plotly);
  }
});

function chart(root, figure) {
  const seen = new IntersectionObserver(
    async (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      seen.disconnect();
      draw(root, figure, await plotly());
      sizes.observe(root);
    },
    { rootMargin: "300px" },
  );
  seen.observe(root);
  for (const one of root.closest("figure")?.querySelectorAll("[data-trace]") ?? []) {
    one.addEventListener("click", () => {
      const number = Number(one.dataset.trace);
      figure.hidden ??= new Set();
      if (!figure.hidden.delete(number)) figure.hidden.add(number);
      one.setAttribute("aria-pressed", String(!figure.hidden.has(number)));
      if (drawn.has(root)) draw(root, figure, window.Plotly);
    });
  }
  onPrint.push(() => window.Plotly && draw(root, figure, window.Plotly));
}

onTheme.push(() => {
  for (const [root, { figure }] of drawn) draw(root, figure, window.Plotly);
});

async function savePicture(number, name) {
  const root = document.querySelector(`[data-chart="${number}"]`);
  const figure = page.data.charts[number];
  const Plotly = await plotly();
  const size = { width: Math.max(900, root.clientWidth), height: figure.height + 60 };
  const layout = { ...layoutFor(root, figure), ...size, showlegend: Boolean(figure.layout.showlegend) };
  download(`${name}.png`, await Plotly.toImage({ data: figure.data, layout }, { format: "png", scale: 2, ...size }));
}
