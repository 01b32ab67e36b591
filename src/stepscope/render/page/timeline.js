// The timeline: tracks of events on one canvas, with its controls and legend.

const STYLE = `
.stt { position: relative; color: var(--stt-fg); font: 13px/1.4 ${FONT}; }
.stt-bar { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin: 0 0 6px; }
.stt-bar input { flex: 0 1 240px; min-width: 120px; }
.stt-bar input, .stt button { font: inherit; color: inherit; background: var(--stt-bg); padding: 2px 9px;
  border: 1px solid var(--stt-line); border-radius: 5px; }
.stt button { cursor: pointer; }
.stt button:hover { border-color: var(--stt-fg); }
.stt-count, .stt-keys { color: var(--stt-muted); font-size: 12px; }
.stt-keys { margin-left: auto; }
.stt-box { position: relative; overflow: hidden; border: 1px solid var(--stt-line); border-radius: 6px; resize: vertical; }
.stt canvas { position: absolute; inset: 0; width: 100%; height: 100%; touch-action: none; outline: none; }
.stt-box:focus-within { border-color: var(--stt-accent); box-shadow: 0 0 0 1px var(--stt-accent); }
.stt :is(button, input):focus-visible { outline: 2px solid var(--stt-accent); outline-offset: 1px; }
.stt-tip, .stt-panel { position: absolute; z-index: 2; background: var(--stt-bg); color: var(--stt-fg);
  border: 1px solid var(--stt-line); border-radius: 6px; box-shadow: 0 3px 14px #0003; overflow-wrap: anywhere; }
.stt-tip { pointer-events: none; max-width: min(420px, 70%); padding: 4px 8px; font-size: 12px; }
.stt-tip div + div { color: var(--stt-muted); }
.stt-panel { right: 14px; bottom: 8px; width: min(480px, calc(100% - 28px)); max-height: 62%; overflow: auto;
  padding: 8px 10px; font-size: 12px; box-sizing: border-box; }
.stt-name { margin: 0 30px 5px 0; font-size: 13px; font-weight: 600; max-height: 5.6em; overflow: auto; }
.stt-panel dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 10px; margin: 0; }
.stt-panel dt { color: var(--stt-muted); } .stt-panel dd { margin: 0; min-width: 0; }
.stt-panel dd button { padding: 0 6px; margin: 0 4px 2px 0; text-align: left; max-width: 100%; }
.stt-close { position: absolute; right: 6px; top: 6px; }
.stt-legend { display: flex; flex-wrap: wrap; gap: 2px 12px; margin: 7px 0 0; padding: 0; list-style: none; font-size: 12px; }
.stt-legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
.stt-group { min-width: 2.6em; color: var(--stt-muted); }
.stt-note { margin: 6px 0 0; color: var(--stt-muted); font-size: 12px; }
.stt-live { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
`;

class StepscopeTimeline extends TimelineMoving {
  constructor(root, meta, buffer) {
    super();
    this.data = new Data(meta, buffer);
    this.meta = meta;
    this.root = root;
    this.view = this.whole();
    this.scroll = 0;
    this.collapsed = new Set();
    this.chosen = this.hovered = -1;
    this.kernels = []; // of the chosen launch
    this.spans = [];
    this.matches = null;
    this.pointers = new Map();
    this.shown = [];
    this.widths = new Map();
    this.lastDrawMs = 0;
    this.build();
    this.theme();
    this.layOut();
    this.listen();
    this.fit();
    this.paint();
    performance.mark("stepscope-timeline-drawn");
    window.stepscopeTimeline = this;
  }

  // -- public

  // The range on screen, in nanoseconds since the trace's first event.
  get range() {
    return { startNs: this.view.start * this.meta.tick_ns, endNs: this.view.end * this.meta.tick_ns };
  }
  get selected() { return this.chosen < 0 ? null : this.about(this.chosen); }
  get labelsDrawn() { return this.shown.slice(); }
  get numMatches() { return this.matches ? this.matches.order.length : 0; }

  // Zoom to a stretch of the trace's clock with a margin, and mark spans of it: [[startNs, endNs], …].
  show(startNs, endNs, spans = [[startNs, endNs]]) {
    const from = this.ticks(startNs), to = Math.max(this.ticks(endNs), from);
    this.spans = spans.map(([start, end]) => [this.ticks(start), this.ticks(end)]);
    this.go(from - (to - from) * MARGIN - SHORTEST / 4, to + (to - from) * MARGIN + SHORTEST / 4, true);
  }
  zoomTo(event) {
    const length = Math.max(this.data.length[event], 8);
    this.go(this.data.start[event] - length, this.data.start[event] + 2 * length, false);
    this.bring(event);
  }
  find(text) {
    this.input.value = text;
    this.search();
    return this.numMatches;
  }

  ticks(ns) {
    // Nanoseconds since 1970 exceed a double's precision, so they come as text or as a bigint.
    const exact = typeof ns === "string" || typeof ns === "bigint";
    const since = exact ? Number(BigInt(ns) - BigInt(this.meta.origin_ns)) : ns - Number(this.meta.origin_ns);
    return since / this.meta.tick_ns;
  }
  whole() {
    const margin = Math.max(this.meta.total * 0.01, 1);
    return { start: -margin, end: Math.max(this.meta.total + margin, SHORTEST) };
  }
  about(event) {
    const { data } = this, lane = data.laneOf(event), texts = {};
    for (const name of ["name", "module", "op", "shapes", "dtypes", "step", "phase", "caller", "more"])
      texts[name] = data.text(name, event);
    return {
      ...texts, index: event, label: data.label(event), kind: data.kinds[data.kind[event]], lane,
      track: this.meta.tracks[data.trackOfLane[lane]].title,
      startNs: data.start[event] * this.meta.tick_ns, durationNs: data.length[event] * this.meta.tick_ns,
      launch: data.launch[event] - 1,
    };
  }

  // -- the page around the canvas

  build() {
    const make = (tag, name, text) => {
      const element = document.createElement(tag);
      if (name) element.className = name;
      if (text) element.textContent = text;
      return element;
    };
    this.make = make;
    const button = (text, label, action) => {
      const element = make("button", "", text);
      element.type = "button";
      element.setAttribute("aria-label", label);
      element.title = label;
      element.addEventListener("click", action);
      return element;
    };
    this.button = button;
    this.root.textContent = "";
    const outer = this.outer = make("div", "stt");
    outer.append(make("style", "", STYLE));
    const bar = make("div", "stt-bar");
    this.input = make("input");
    Object.assign(this.input, { type: "search", placeholder: "Find op, kernel, module" });
    this.input.setAttribute("aria-label", "Find events by name, op or module");
    this.count = make("span", "stt-count");
    this.count.setAttribute("role", "status");
    bar.append(
      this.input, button("‹", "previous match (N)", () => this.next(-1)), button("›", "next match (n)", () => this.next(1)),
      this.count,
      button("+", "zoom in (+)", () => this.zoom(0.5, 0.5, true)), button("−", "zoom out (−)", () => this.zoom(2, 0.5, true)),
      button("All", "show everything (0)", () => this.all()),
      make("span", "stt-keys", "wheel zooms · drag moves · click selects · W A S D · double-click zooms to an event"));
    this.box = make("div", "stt-box");
    this.canvas = make("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label",
      `Timeline of ${counted(this.meta.num_events, "event")} on ${counted(this.meta.tracks.length, "track")}. ` +
      "Arrows move, plus and minus zoom, 0 shows all, slash searches, n and N go to the next and the previous match, " +
      "Enter selects, Shift with arrows goes from event to event, F zooms to the selected one, Escape clears the selection.");
    this.context = this.canvas.getContext("2d");
    this.base = document.createElement("canvas");
    this.strip = document.createElement("canvas");
    this.tip = make("div", "stt-tip");
    this.panel = make("div", "stt-panel");
    this.tip.hidden = this.panel.hidden = true;
    this.panel.setAttribute("role", "group");
    this.panel.setAttribute("aria-label", "Selected event");
    this.box.append(this.canvas, this.tip, this.panel);
    this.live = make("div", "stt-live");
    this.live.setAttribute("aria-live", "polite");
    outer.append(bar, this.box, this.live);
    for (const [group, title] of [["host", "Host"], ["gpu", "GPU"]]) {
      const legend = make("ul", "stt-legend");
      legend.append(make("li", "stt-group", title));
      for (const number of this.meta.used_colors) {
        const { name, color, group: own } = this.meta.colors[number];
        if (!name || own !== group) continue;
        const item = make("li"), swatch = make("i");
        swatch.style.background = color;
        item.append(swatch, name);
        legend.append(item);
      }
      if (legend.childElementCount > 1) outer.append(legend);
    }
    outer.append(make("p", "stt-note", this.meta.note));
    this.root.append(outer);
  }

  theme() {
    const styles = getComputedStyle(this.root), dark = this.isDark(), probe = this.make("span");
    this.outer.append(probe);
    // The page's own colors; a computed color is always rgb(…).
    const read = (names, light, night) => {
      const name = names.find((each) => styles.getPropertyValue(each).trim());
      probe.style.color = name ? `var(${name})` : dark ? night : light;
      const parts = getComputedStyle(probe).color.match(/[\d.]+/g);
      return css(parts.slice(0, 3).map(Number));
    };
    const colors = this.colors = {
      bg: read(["--panel", "--bg"], "#ffffff", "#14171c"), fg: read(["--fg", "--text"], "#1c2026", "#e6e8eb"),
      line: read(["--grid", "--line"], "#dfe3e8", "#343a44"), muted: read(["--muted", "--dim"], "#5c6672", "#9aa4b2"),
      accent: read(["--accent"], "#0a5ea8", "#6fb7f5"),
    };
    probe.remove();
    for (const [name, color] of Object.entries(colors)) this.outer.style.setProperty(`--stt-${name}`, color);
    const back = colors.bg.match(/\d+/g).map(Number);
    this.styles = this.meta.colors.map(({ color }) => {
      const plain = rgbOf(color);
      const shades = SHADES.map((share) => mixed(plain, share > 0 ? [255, 255, 255] : [0, 0, 0], Math.abs(share)));
      return {
        words: (255 << 24 | plain[2] << 16 | plain[1] << 8 | plain[0]) >>> 0,
        fills: shades.map(css),
        faded: css(mixed(plain, back, 0.8)),
        inks: shades.map((shade) => (lightness(shade) > 0.5 ? "#14171c" : "#ffffff")),
        blocks: Array.from({ length: 9 }, (_, i) => css(mixed(back, plain, FAINTEST + (1 - FAINTEST) * i / 8))),
      };
    });
    this.stale = true;
  }
  isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  // Where every lane and curve is, from the top of all.
  layOut() {
    this.rows = [];
    this.heads = [];
    let y = AXIS + 4;
    const curves = () => this.data.curves.forEach((curve) => {
      const key = `memory ${curve.title}`, height = this.collapsed.has(key) ? LANE : MEMORY;
      const top = bytesText(curve.highest * curve.unit_bytes);
      this.heads.push({ key, title: curve.title, detail: `0 to ${top}`, y, height, folds: true,
        tip: `${curve.detail}${curve.reserved ? "; dashed: reserved" : ""}; the scale goes from 0 to ${top}` });
      this.rows.push({ curve, y, height });
      y += height + GAP;
    });
    let done = false;
    this.meta.tracks.forEach((track, number) => {
      if (track.kind === "host" && !done) { done = true; curves(); }
      const key = `track ${number}`, num = this.collapsed.has(key) ? 1 : track.num_lanes;
      const tall = track.kind === "gpu" || track.kind === "communication" ? TALL : LANE;
      this.heads.push({ key, title: track.title, detail: track.detail, y, height: num * tall, folds: track.num_lanes > 1 });
      for (let i = 0; i < num; i++, y += tall) this.rows.push({ lane: track.first_lane + i, y, height: tall });
      y += GAP;
    });
    if (!done) curves();
    this.contentHeight = y + 4;
    this.stale = true;
  }

  // The canvas as large as its box, in the device's own pixels.
  fit() {
    if (!this.box.style.height) {
      const room = Math.max(300, Math.min(760, Math.round(window.innerHeight * 0.72)));
      this.box.style.height = `${Math.max(180, Math.min(this.contentHeight + 2, room))}px`;
    }
    const width = this.box.clientWidth, height = this.box.clientHeight;
    this.ratio = Math.min(window.devicePixelRatio || 1, 3);
    this.width = Math.max(width, 120);
    this.height = Math.max(height, 80);
    this.gutter = Math.round(Math.max(84, Math.min(200, this.width * 0.16)));
    for (const canvas of [this.canvas, this.base]) {
      canvas.width = Math.round(this.width * this.ratio);
      canvas.height = Math.round(this.height * this.ratio);
    }
    this.plot = this.width - this.gutter - (this.contentHeight > this.height ? BAR + 3 : 0);
    this.scrollTo(this.scroll);
    this.stale = true;
  }
}

window.StepscopeTimeline = StepscopeTimeline;
