"use strict";
// Fetches the parts of the page again and again, and replaces those that changed.
(() => {
  const root = document.documentElement, body = document.body;
  const find = (id) => document.getElementById(id);
  const everyMs = 1000 * Number(body.dataset.every);
  const shown = new Map();
  let isOver = false;
  root.classList.add("js");

  /** Replace an element's content, if it is not the same already. The server has escaped every text in it. */
  function fill(element, html) {
    if (shown.get(element.id) === html) return;
    shown.set(element.id, html);
    element.innerHTML = html;
  }

  function show(state) {
    fill(find("verdict"), state.verdict);
    const parts = find("parts"), names = Object.keys(state.parts);
    for (const old of [...parts.children]) {
      if (!names.includes(old.id)) { old.remove(); shown.delete(old.id); }
    }
    names.forEach((name, place) => {
      let element = find(name);
      if (!element) {
        element = document.createElement("div");
        element.id = name;
      }
      if (parts.children[place] !== element) parts.insertBefore(element, parts.children[place] ?? null);
      fill(element, state.parts[name]);
    });
    isOver = state.is_over;
    find("read").textContent = `${isOver ? "ended; read at" : "read at"} ${new Date().toLocaleTimeString()}`;
    body.classList.remove("lost");
    root.classList.add("ready");
  }

  const isPaused = () => find("pause").getAttribute("aria-pressed") === "true";

  async function update() {
    if (!isPaused() && !document.hidden && !isOver) {
      try {
        const answer = await fetch("state", { cache: "no-store" });
        if (!answer.ok) throw new Error(String(answer.status));
        const state = await answer.json();
        if (!isPaused()) show(state);  // it may have been paused while the answer was on its way
      } catch {
        body.classList.add("lost");
        find("verdict").textContent = "stepscope watch has ended or cannot be reached. These are its last figures.";
        shown.delete("verdict");
      }
    }
    if (!isOver) setTimeout(update, everyMs);
  }

  find("pause").addEventListener("click", (event) => {
    const is = event.currentTarget.getAttribute("aria-pressed") !== "true";
    event.currentTarget.setAttribute("aria-pressed", String(is));
    event.currentTarget.textContent = is ? "Paused" : "Pause";
  });
  const themes = find("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const name = () => { themes.textContent = isDark() ? "Light" : "Dark"; };
  themes.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  name();
  update();
})();
