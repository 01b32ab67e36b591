// Sections as pages, keys, light and dark, printing.

const sections = [...document.querySelectorAll("main > section")];
const links = [...document.querySelectorAll(".bar nav a")];
const onShow = [];
const onTheme = [];

function current() {
  return sections.findIndex((section) => section.classList.contains("current"));
}

/** Show a section; `#kernels` is a link to it. */
function show(id) {
  const at = Math.max(0, sections.findIndex((section) => section.id === id));
  if (at === current()) return;
  sections.forEach((section, number) => section.classList.toggle("current", number === at));
  links.forEach((link, number) => {
    if (number === at) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  links[at]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  document.documentElement.classList.toggle("first", at === 0);
  window.scrollTo(0, 0);
  for (const listener of onShow) listener(sections[at]);
}

function go(id) {
  if (location.hash === `#${id}`) show(id);
  else location.hash = id;
}

window.addEventListener("hashchange", () => show(location.hash.slice(1)));
show(location.hash.slice(1));

// The theme is the system's until it is chosen here; nothing is stored.
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : systemIsDark.matches;
}

function themeChanged() {
  themeButton.textContent = isDark() ? "Light" : "Dark";
  for (const listener of onTheme) listener();
}

function turnTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  themeChanged();
}

themeButton.addEventListener("click", turnTheme);
systemIsDark.addEventListener("change", themeChanged);
themeChanged();

const keys = document.getElementById("keys");
const showKeys = () => (keys.open ? keys.close() : keys.showModal());
document.getElementById("help").addEventListener("click", showKeys);
keys.querySelector("button").addEventListener("click", () => keys.close());

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.target.isContentEditable;
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const last = sections.length - 1;
  let to = null;
  if (/^[0-9]$/.test(event.key)) to = (Number(event.key) + 9) % 10;
  else if (event.key === "[") to = Math.max(0, current() - 1);
  else if (event.key === "]") to = Math.min(last, current() + 1);
  else if (event.key === "t") turnTheme();
  else if (event.key === "?") showKeys();
  else return;
  event.preventDefault();
  if (to !== null && to <= last) go(sections[to].id);
});

// On paper: every section below the other, dark on white.
const onPrint = [];
let themeBefore;
window.addEventListener("beforeprint", () => {
  themeBefore = document.documentElement.dataset.theme;
  document.documentElement.classList.add("printing");
  document.documentElement.dataset.theme = "light";
  themeChanged();
  for (const listener of onPrint) listener();
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  if (themeBefore) document.documentElement.dataset.theme = themeBefore;
  else delete document.documentElement.dataset.theme;
  themeChanged();
});
