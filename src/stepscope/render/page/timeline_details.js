// Details of an event: the panel, the tooltip, selection and search.

class TimelineDetails extends TimelineDrawing {
  lineOf(event) {
    const info = this.about(event);
    return [info.label, `${duration(info.durationNs)} · ${info.kind}${info.module ? ` · ${info.module}` : ""}`];
  }
  // A note for sums: they leave out events that are only shaded.
  get thinned() { return this.meta.num_drawn < this.meta.num_events ? " (of events drawn individually)" : ""; }
  fillPanel() {
    const { data, make, button, meta } = this, event = this.chosen;
    this.panel.hidden = event < 0;
    this.panel.textContent = "";
    if (event < 0) return;
    const info = this.about(event), list = make("dl");
    const add = (name, ...values) => {
      const shown = values.filter((value) => value !== "" && value !== null);
      if (!shown.length) return;
      const term = make("dt", "", name), value = make("dd");
      value.append(...shown);
      list.append(term, value);
    };
    const jump = (other, more = "") => {
      const text = data.label(other);
      return button(`${text.length > 60 ? `${text.slice(0, 59)}…` : text} · ${duration(data.length[other] * meta.tick_ns)}${more}`,
        "go to this event", () => this.select(other, true));
    };
    add("duration", `${duration(info.durationNs)}, starts at ${duration(info.startNs)}`);
    add("where", `${info.track}${info.step && info.kind !== "step" ? `, step ${info.step}` : ""}` +
      `${info.phase && info.kind !== "phase" ? `, ${info.phase}` : ""}`);
    add("kind", info.kind);
    add("module", info.module);
    add("op", info.op);
    add("shapes", info.shapes.replace(/,(?=\S)/g, ", "));
    add("dtypes", info.dtypes.replace(/,(?=\S)/g, ", "));
    if (info.launch >= 0) {
      const waited = (data.start[event] - data.end(info.launch)) * meta.tick_ns;
      add("launched by", jump(info.launch),
        waited > 0 ? `started ${duration(waited)} after its launch returned` : "started before its launch returned");
    }
    const { kernels } = this;
    add(kernels.length > 1 ? "kernels" : "kernel", ...kernels.slice(0, 6).map((kernel) => jump(kernel)),
      kernels.length > 6 ? `and ${whole(kernels.length - 6)} more` : "");
    if (["op", "annotation", "python"].includes(info.kind)) {
      const work = data.launchedIn(event);
      const total = work.reduce((sum, each) => sum + data.length[each], 0) * meta.tick_ns;
      if (work.length) add("on the GPU", `${duration(total)} in ${work.length === 1 ? "1 kernel or copy" : `${whole(work.length)} kernels and copies`}${this.thinned} `,
        jump(work.reduce((best, each) => (data.length[each] > data.length[best] ? each : best))));
    }
    add("called from", info.caller);
    add("size", info.more);
    const around = data.around(event).slice(0, 5);
    if (around.length) add("within", ...around.map((other) => jump(other)));
    let num = 0, total = 0;
    for (let i = 0; i < data.num; i++) if (data.name[i] === data.name[event] && !data.isCopy(i)) { num++; total += data.length[i]; }
    if (num > 1) add("same name", `${counted(num, "event")}, ${duration(total * meta.tick_ns)} in total${this.thinned} `,
      button("find all", "search for this name", () => { this.find(info.name); this.tally(); }));
    const close = button("×", "close (Escape)", () => this.select(-1));
    close.className = "stt-close";
    this.panel.append(close, make("div", "stt-name", info.name), list);
    this.panel.scrollTop = 0;
  }
  showTip(lines, x, y) {
    this.tip.hidden = !lines;
    if (!lines) return;
    this.tip.textContent = "";
    for (const line of lines) if (line) this.tip.append(this.make("div", "", line));
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    this.tip.style.left = `${Math.max(2, Math.min(x + 14, this.width - width - 4))}px`;
    this.tip.style.top = `${y + 18 + height > this.height ? Math.max(2, y - height - 8) : y + 18}px`;
  }
  // What is under a point of the canvas.
  under(x, y) {
    const at = y + this.scroll;
    if (y < AXIS) return { axis: true };
    if (x < this.gutter) return { head: this.heads.find((head) => at >= head.y - 2 && at < head.y + head.height + 4) };
    const row = this.rows.find((each) => at >= each.y && at < each.y + each.height);
    if (!row || x > this.gutter + this.plot) return {};
    const time = this.timeAt(x), reach = 2 * (this.view.end - this.view.start) / this.plot;
    if (row.curve) return { curve: row.curve, time };
    const event = this.data.at(row.lane, time, reach), level = this.level();
    if (event >= 0 && (level === this.data.levels[0] || this.data.length[event] >= level.width)) return { event };
    const block = this.data.blockAt(level, row.lane, time, reach);
    if (block >= 0 && (level !== this.data.levels[0] || event < 0)) {
      // A block of one event is that event.
      return level.num[block] === 1 && event >= 0 ? { event } : { block, level };
    }
    return event >= 0 ? { event } : {};
  }
  hover(x, y) {
    const found = this.under(x, y), { meta } = this;
    this.canvas.style.cursor = found.head && found.head.folds || found.event >= 0 ? "pointer" : "default";
    this.pointer = y > 0 && x > this.gutter ? x : null;
    this.hovered = found.event === undefined ? -1 : found.event;
    let lines = null;
    if (found.head) lines = [found.head.title, found.head.tip || found.head.detail];
    else if (found.event >= 0) lines = this.lineOf(found.event);
    else if (found.block >= 0) {
      const { level, block } = found, length = level.length[block], busy = level.busy[block];
      lines = [counted(level.num[block], "event"),
        `${duration(busy * meta.tick_ns)} of ${duration(length * meta.tick_ns)}` +
        (level.width ? "; zoom in to see them" : "; too short to draw individually")];
    } else if (found.curve) {
      const { curve, time } = found, i = lastAt(curve.time, time, 0, curve.time.length);
      if (i >= 0) lines = [`${bytesText(curve.allocated[i] * curve.unit_bytes)} allocated`,
        curve.reserved ? `${bytesText(curve.reserved[i] * curve.unit_bytes)} reserved` : ""];
    }
    this.showTip(lines, x, y);
    this.ask();
  }
  // -- selecting

  select(event, move = false) {
    this.chosen = event;
    const { data } = this, isLaunch = event >= 0 && ["runtime", "driver"].includes(data.kinds[data.kind[event]]);
    this.kernels = isLaunch ? data.kernelsOf(event) : [];
    this.fillPanel();
    if (event >= 0) {
      const info = this.about(event);
      this.live.textContent = `${info.kind} ${info.name}, ${duration(info.durationNs)}, ${info.track}`;
      if (move) this.reveal(event);
    } else this.live.textContent = "";
    this.redraw();
  }
  // Bring an event on screen, wide enough to be seen.
  reveal(event) {
    const { data } = this, start = data.start[event], end = data.end(event), view = this.aim();
    const span = view.end - view.start, wide = (end - start) * this.plot / span;
    if (start < view.start || end > view.end || wide < 6) {
      const wanted = wide < 6 || end - start > span ? Math.max((end - start) * 8, SHORTEST) : span;
      this.go((start + end - wanted) / 2, (start + end + wanted) / 2, true);
    }
    this.bring(event);
  }
  bring(event) {
    const lane = this.data.laneOf(event), key = `track ${this.data.trackOfLane[lane]}`;
    let row = this.rows.find((each) => each.lane === lane);
    if (!row) { this.collapsed.delete(key); this.layOut(); this.fit(); row = this.rows.find((each) => each.lane === lane); }
    const room = this.height - (this.panel.hidden ? 0 : Math.min(this.panel.offsetHeight, this.height * 0.4));
    if (row.y - this.scroll < AXIS + 4 || row.y + row.height - this.scroll > room - 8) this.scrollTo(row.y - room / 2);
    this.redraw();
  }
  step(sideways, down) {
    const { data } = this;
    if (this.chosen < 0) return this.choose();
    const lane = data.laneOf(this.chosen), middle = data.start[this.chosen] + data.length[this.chosen] / 2;
    if (sideways) {
      const next = this.chosen + sideways;
      if (next >= data.lanes[lane] && next < data.lanes[lane + 1]) this.select(next, true);
      return;
    }
    for (let other = lane + down; other >= 0 && other < this.meta.num_lanes; other += down) {
      const next = data.at(other, middle, this.view.end - this.view.start);
      if (next >= 0) return this.select(next, true);
    }
  }
  choose() {
    const time = (this.view.start + this.view.end) / 2, reach = (this.view.end - this.view.start) / 2;
    for (const row of this.rows) {
      if (row.curve || row.y - this.scroll < AXIS) continue;
      const found = this.data.at(row.lane, time, reach);
      if (found >= 0) return this.select(found);
    }
  }

  search() {
    clearTimeout(this.waiting); // search now, and not again later: that would lose the current match
    const query = this.input.value.trim().toLowerCase(), { data } = this;
    this.current = -1;
    if (!query) { this.matches = null; this.count.textContent = ""; return this.redraw(); }
    const hit = Uint8Array.from(data.strings, (text, i) =>
      i && (text.toLowerCase().includes(query) || data.labels[i].toLowerCase().includes(query)) ? 1 : 0);
    const flags = new Uint8Array(data.num), order = [];
    for (let i = 0; i < data.num; i++) {
      if (hit[data.name[i]] || hit[data.module[i]] || hit[data.op[i]]) {
        flags[i] = 1;
        if (!data.isCopy(i)) order.push(i);
      }
    }
    order.sort((a, b) => data.start[a] - data.start[b] || a - b);
    this.matches = { flags, order };
    this.tally();
    this.redraw();
  }
  tally() {
    const num = this.numMatches, shading = this.thinned && " drawn individually";
    const place = this.current >= 0 ? `${whole(this.current + 1)} of ` : "";
    this.count.textContent = this.matches ? (num ? `${place}${counted(num, "event")}${shading}` : "no match") : "";
  }
  next(way) {
    if (!this.matches && this.input.value) this.search();
    if (!this.numMatches) return;
    const { order } = this.matches, { data } = this, num = order.length;
    if (this.current < 0) {
      const middle = (this.view.start + this.view.end) / 2;
      const after = order.findIndex((event) => data.start[event] >= this.view.start && data.start[event] <= this.view.end);
      this.current = after >= 0 ? after : Math.max(0, order.findIndex((event) => data.start[event] >= middle));
    } else this.current = (this.current + way + num) % num;
    this.select(order[this.current], true);
    this.tally();
  }
}
