// Moving about on the timeline: zoom, pan, scroll, folding, pointers and keys.

class TimelineMoving extends TimelineDetails {
  ask() {
    if (!this.asked) this.asked = requestAnimationFrame(() => { this.asked = 0; this.paint(); });
  }
  redraw() { this.stale = true; this.ask(); }
  limited(start, end) {
    const all = this.whole(), least = SHORTEST, most = (all.end - all.start) * 1.1;
    let span = Math.min(Math.max(end - start, least), most);
    const middle = (start + end) / 2;
    start = Math.min(Math.max(middle - span / 2, all.start - span * 0.3), all.end - span * 0.7);
    return { start, end: start + span };
  }
  go(start, end, slowly) {
    const target = this.limited(start, end), from = this.view;
    if (!slowly || matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.moving = null;
      this.view = target;
      return this.redraw();
    }
    const began = performance.now(), moving = this.moving = { target };
    const ratio = (target.end - target.start) / (from.end - from.start);
    const step = () => {
      if (this.moving !== moving) return;
      const done = Math.min(1, (performance.now() - began) / 220), eased = 1 - (1 - done) ** 3;
      // Spans change by a factor, so that no part of the way is a leap; the ends go where that takes them.
      const share = Math.abs(ratio - 1) < 1e-6 ? eased : (ratio ** eased - 1) / (ratio - 1);
      this.view = done === 1 ? target : {
        start: from.start + (target.start - from.start) * share, end: from.end + (target.end - from.end) * share };
      this.stale = true;
      this.paint();
      if (done < 1) requestAnimationFrame(step); else this.moving = null;
    };
    requestAnimationFrame(step);
  }
  aim() { return this.moving ? this.moving.target : this.view; }
  all() { const all = this.whole(); this.go(all.start, all.end, true); }
  zoom(factor, at, slowly = false) {
    const { start, end } = slowly ? this.aim() : this.view, fixed = start + (end - start) * at;
    this.go(fixed - (fixed - start) * factor, fixed + (end - fixed) * factor, slowly);
  }
  pan(share, slowly = false) {
    const { start, end } = slowly ? this.aim() : this.view, by = (end - start) * share;
    this.go(start + by, end + by, slowly);
  }
  scrollTo(y) {
    const most = Math.max(0, this.contentHeight + (this.panel.hidden ? 0 : 60) - this.height);
    this.scroll = Math.round(Math.max(0, Math.min(y, most)));
    this.stale = true;
  }
  toggle(key) {
    if (!this.collapsed.delete(key)) this.collapsed.add(key);
    this.layOut();
    this.fit();
    this.ask();
  }

  // -- pointers and keys

  listen() {
    const { canvas } = this;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [x] = place(event), unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? this.height : 1;
      if (x < this.gutter && !event.ctrlKey) { this.scrollTo(this.scroll + event.deltaY * unit); return this.ask(); }
      this.moving = null;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return this.pan(event.deltaX * unit / this.plot);
      const speed = event.ctrlKey ? 0.008 : 0.0022;
      this.zoom(Math.exp(Math.max(-160, Math.min(160, event.deltaY * unit)) * speed), this.shareAt(x));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button > 0) return;
      canvas.setPointerCapture(event.pointerId);
      const [x, y] = place(event);
      this.pointers.set(event.pointerId, { x, y });
      this.moving = null;
      if (this.pointers.size === 1) {
        const bar = this.contentHeight > this.height && x > this.width - BAR - 3;
        this.drag = { x, y, from: { ...this.view }, scroll: this.scroll, moved: false, bar, range: y < AXIS && x > this.gutter };
      } else this.drag = null;
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event), known = this.pointers.get(event.pointerId);
      if (!known) return this.hover(x, y);
      if (this.pointers.size === 2) {
        const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, each]) => each);
        const before = Math.max(20, Math.hypot(known.x - other.x, known.y - other.y));
        const after = Math.max(20, Math.hypot(x - other.x, y - other.y));
        const middle = (known.x + other.x) / 2;
        this.pan((middle - (x + other.x) / 2) / this.plot);
        this.zoom(before / after, this.shareAt((x + other.x) / 2));
      } else if (this.drag) this.dragTo(x, y);
      known.x = x;
      known.y = y;
    });
    const lift = (event, click) => {
      const [x, y] = place(event), { drag } = this;
      this.pointers.delete(event.pointerId);
      this.drag = null;
      if (!drag) return;
      if (drag.range && drag.moved) {
        const ends = [drag.x, x].map((each) => this.timeAt(each)).sort((a, b) => a - b);
        this.picked = null;
        if (click) this.go(...ends, true);
      } else if (click && !drag.moved && !drag.bar) this.click(x, y);
      this.redraw();
    };
    canvas.addEventListener("pointerup", (event) => lift(event, true));
    canvas.addEventListener("pointercancel", (event) => lift(event, false));
    canvas.addEventListener("pointerleave", () => {
      if (this.drag) return;
      this.pointer = null;
      this.hovered = -1;
      this.showTip(null);
      this.ask();
    });
    canvas.addEventListener("dblclick", (event) => {
      const found = this.under(...place(event));
      if (found.event >= 0) {
        const length = Math.max(this.data.length[found.event], 4);
        this.go(this.data.start[found.event] - length * MARGIN, this.data.end(found.event) + length * MARGIN, true);
      } else if (found.block >= 0) {
        const start = found.level.start[found.block], length = Math.max(found.level.length[found.block], 4);
        this.go(start - length * MARGIN, start + length * (1 + MARGIN), true);
      }
    });
    this.outer.addEventListener("keydown", (event) => this.key(event));
    this.input.addEventListener("input", () => { clearTimeout(this.waiting); this.waiting = setTimeout(() => this.search(), 120); });
    new ResizeObserver(() => {
      if (this.box.clientWidth === this.width && this.box.clientHeight === this.height) return;
      this.fit();
      this.paint();
    }).observe(this.box);
    const dress = () => { this.theme(); this.ask(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
    new MutationObserver(dress).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class", "style"] });
  }
  dragTo(x, y) {
    const { drag } = this;
    if (!drag.moved && Math.hypot(x - drag.x, y - drag.y) < 4) return;
    drag.moved = true;
    this.showTip(null);
    this.hovered = -1;
    if (drag.bar) this.scrollTo(drag.scroll + (y - drag.y) * this.contentHeight / this.height);
    else if (drag.range) this.picked = [this.timeAt(drag.x), this.timeAt(x)];
    else {
      const by = (drag.x - x) * (drag.from.end - drag.from.start) / this.plot;
      this.view = this.limited(drag.from.start + by, drag.from.end + by);
      this.scrollTo(drag.scroll + drag.y - y);
      this.canvas.style.cursor = "grabbing";
    }
    this.redraw();
  }
  click(x, y) {
    const found = this.under(x, y);
    if (found.head) { if (found.head.folds) this.toggle(found.head.key); return; }
    if (found.event >= 0) return this.select(found.event);
    if (found.block >= 0 && found.level.width) {
      const start = found.level.start[found.block], length = Math.max(found.level.length[found.block], SHORTEST);
      return this.go(start - length, start + 2 * length, true);
    }
    if (!found.axis) this.select(-1);
  }
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === this.input) {
      if (event.key === "Enter") { this.search(); this.next(event.shiftKey ? -1 : 1); event.preventDefault(); }
      if (event.key === "Escape") { this.input.value = ""; this.search(); this.canvas.focus(); event.preventDefault(); }
      return;
    }
    const at = this.pointer ? this.shareAt(this.pointer) : 0.5, { key } = event;
    if (event.target !== this.canvas && (key === "Enter" || key === " ")) return;
    const act = {
      ArrowLeft: () => (event.shiftKey ? this.step(-1, 0) : this.pan(-0.2, true)),
      ArrowRight: () => (event.shiftKey ? this.step(1, 0) : this.pan(0.2, true)),
      ArrowUp: () => (event.shiftKey ? this.step(0, -1) : this.scrollTo(this.scroll - 3 * LANE)),
      ArrowDown: () => (event.shiftKey ? this.step(0, 1) : this.scrollTo(this.scroll + 3 * LANE)),
      PageUp: () => this.scrollTo(this.scroll - this.height * 0.8),
      PageDown: () => this.scrollTo(this.scroll + this.height * 0.8),
      a: () => this.pan(-0.2, true), d: () => this.pan(0.2, true),
      w: () => this.zoom(0.6, at, true), s: () => this.zoom(1 / 0.6, at, true),
      "+": () => this.zoom(0.5, at, true), "=": () => this.zoom(0.5, at, true),
      "-": () => this.zoom(2, at, true), "−": () => this.zoom(2, at, true),
      "0": () => this.all(), "/": () => { this.input.focus(); this.input.select(); },
      n: () => this.next(1), N: () => this.next(-1), Enter: () => this.choose(),
      f: () => { if (this.chosen >= 0) { const { data } = this; this.go(data.start[this.chosen] - data.length[this.chosen] * MARGIN,
        data.end(this.chosen) + data.length[this.chosen] * MARGIN, true); this.bring(this.chosen); } },
      Escape: () => {
        if (this.chosen >= 0) this.select(-1);
        else if (this.spans.length) this.spans = [];
        else if (this.matches) { this.input.value = ""; this.search(); }
      },
    }[key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
    this.redraw();
  }
}
