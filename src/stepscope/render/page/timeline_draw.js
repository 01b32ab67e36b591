// The timeline's picture: lanes, curves, axis, names at the left, arrows; drawn anew only when something changed.

const LANE = 18, TALL = 26, GAP = 10, AXIS = 30, MEMORY = 58, BAR = 9;
const NARROW = 2.5;          // pixels: what is narrower goes into the strip of its lane
const LABEL = 26;            // pixels: what is narrower has no label
const FAINTEST = 0.22;       // opacity of a pixel in which almost nothing happens
const SHORTEST = 16;         // ticks: the closest zoom
const MARGIN = 0.15;
const SHADES = [0, 0.16, -0.12];
const MEMORY_COLOR = "#56b4e9", MARK_COLOR = "#d55e00";
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

/** Needs `data`, `meta`, `view` (ticks), `rows` and `heads` (pixels), `colors` and `styles`; what it draws on. */
class TimelineDrawing {
  timeAt(x) { return this.view.start + (x - this.gutter) / this.plot * (this.view.end - this.view.start); }
  shareAt(x) { return Math.min(1, Math.max(0, (x - this.gutter) / this.plot)); }
  xAt(time) { return this.gutter + (time - this.view.start) / (this.view.end - this.view.start) * this.plot; }

  // The coarsest level whose cells are no wider than two pixels.
  level() {
    const pixel = (this.view.end - this.view.start) / this.plot, { levels } = this.data;
    let found = levels[0];
    for (const level of levels) if (level.width && level.width <= 2 * pixel) found = level;
    return found;
  }
  paint() {
    const began = performance.now();
    if (this.stale) { this.stale = false; this.drawBase(); }
    const { context, ratio } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(this.base, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawOver(context);
    this.lastDrawMs = performance.now() - began;
  }
  drawBase() {
    const context = this.base.getContext("2d", { alpha: false }), { ratio, colors } = this;
    this.shown = [];
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = colors.bg;
    context.fillRect(0, 0, this.base.width, this.base.height);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawGrid(context);
    context.save();
    context.beginPath();
    context.rect(this.gutter, AXIS, this.plot, this.height - AXIS);
    context.clip();
    this.drawSpans(context);
    this.drawLanes(context);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    for (const row of this.rows) if (row.curve && this.isSeen(row)) this.drawCurve(context, row);
    this.drawSpanEdges(context);
    context.restore();
    this.drawHeads(context);
    this.drawAxis(context);
    this.drawBar(context);
  }
  isSeen(row) { return row.y + row.height - this.scroll > AXIS && row.y - this.scroll < this.height; }

  // A round number of nanoseconds between two marks of the axis.
  every() {
    const least = (this.view.end - this.view.start) * this.meta.tick_ns * 92 / this.plot;
    const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
    return Math.max(1, [1, 2, 5, 10].find((factor) => factor * power >= least) * power);
  }
  *marks() {
    const every = this.every(), tick = this.meta.tick_ns, from = Math.max(0, Math.ceil(this.view.start * tick / every));
    for (let i = from; i * every <= this.view.end * tick; i++) yield i * every;
  }
  drawGrid(context) {
    context.fillStyle = this.colors.line;
    for (const ns of this.marks()) context.fillRect(Math.round(this.xAt(ns / this.meta.tick_ns)), AXIS, 1, this.height - AXIS);
    const { start } = this.data.steps, from = Math.max(0, lastAt(start, this.view.start, 0, start.length));
    const to = lastAt(start, this.view.end, from, start.length);
    if (to - from > this.plot / 24) return; // where steps are as dense as a hatching, their own track shows them
    context.fillStyle = this.colors.muted;
    context.globalAlpha = 0.55;
    for (let i = from; i <= to; i++) {
      const x = Math.round(this.xAt(start[i]));
      if (x >= this.gutter) context.fillRect(x, AXIS, 1, this.height - AXIS);
    }
    context.globalAlpha = 1;
  }
  drawAxis(context) {
    const { colors } = this, every = this.every(), tick = this.meta.tick_ns, startNs = Math.max(0, this.view.start * tick);
    context.fillStyle = colors.bg;
    context.fillRect(0, 0, this.width, AXIS);
    context.fillStyle = colors.line;
    context.fillRect(0, AXIS - 1, this.width, 1);
    context.font = `11px ${FONT}`;
    context.textBaseline = "middle";
    // Far from the start and close by, the marks count from a round time, which is written at the left.
    const far = startNs / every > 5000, base = far ? Math.floor(startNs / (every * 1000)) * every * 1000 : 0;
    const [unit, size] = unitOf(Math.max(this.view.end * tick - base, every));
    const places = Math.max(0, Math.ceil(Math.log10(size / every) - 1e-9));
    context.fillStyle = colors.muted;
    context.fillText(far ? `from ${exactly(base, every * 1000)}` : "time", 8, AXIS / 2, this.gutter - 12);
    context.fillStyle = colors.fg;
    for (const ns of this.marks()) {
      const x = this.xAt(ns / tick);
      if (x < this.gutter - 1 || x > this.gutter + this.plot - 4) continue;
      const text = `${far ? "+" : ""}${((ns - base) / size).toFixed(places)} ${unit}`;
      context.fillRect(Math.round(x), AXIS - 6, 1, 5);
      if (x + 4 + context.measureText(text).width < this.gutter + this.plot) context.fillText(text, x + 4, AXIS / 2 - 1);
    }
  }
  drawHeads(context) {
    const { colors } = this;
    context.fillStyle = colors.bg;
    context.fillRect(0, AXIS, this.gutter, this.height - AXIS);
    context.textBaseline = "middle";
    for (const head of this.heads) {
      const y = head.y - this.scroll;
      if (y > this.height || y + head.height < AXIS - GAP) continue;
      context.fillStyle = colors.line;
      context.fillRect(0, y + head.height + GAP / 2 - 1, this.width, 1);
      context.fillStyle = colors.muted;
      context.font = `10px ${FONT}`;
      if (head.folds) context.fillText(this.collapsed.has(head.key) ? "▸" : "▾", 7, y + LANE / 2 + 1);
      // A title stays in sight as long as any of its lanes is.
      const stuck = Math.max(y, Math.min(AXIS + 2, y + head.height - LANE));
      context.fillStyle = colors.fg;
      context.font = `12px ${FONT}`;
      context.fillText(this.cut(context, head.title, this.gutter - 26), 19, stuck + LANE / 2);
      if (head.height >= 2 * LANE && head.detail) {
        context.fillStyle = colors.muted;
        context.font = `11px ${FONT}`;
        context.fillText(this.cut(context, head.detail, this.gutter - 26), 19, stuck + LANE * 1.4);
      }
    }
    context.fillStyle = colors.line;
    context.fillRect(this.gutter - 1, 0, 1, this.height);
  }
  cut(context, text, room) {
    if (context.measureText(text).width <= room) return text;
    let num = text.length;
    while (num > 1 && context.measureText(`${text.slice(0, num)}…`).width > room) num--;
    return `${text.slice(0, num)}…`;
  }
  drawLanes(context) {
    const { ratio, data } = this, level = this.level(), isPlain = level.width === 0;
    const width = Math.max(1, Math.round(this.plot * ratio)), rows = this.rows.filter((row) => !row.curve && this.isSeen(row));
    if (!rows.length) return;
    const span = this.view.end - this.view.start, scale = width / span, begin = this.view.start, end = this.view.end;
    if (this.strip.width !== width || this.strip.height < rows.length) {
      this.strip.width = width;
      this.strip.height = Math.max(rows.length, 64);
    }
    const pixels = new Uint32Array(width * rows.length), cover = new Float32Array(width), most = new Float32Array(width);
    const color = new Uint8Array(width), flags = this.matches && this.matches.flags;
    const left = Math.round(this.gutter * ratio), wide = [];
    const narrow = (x, w, busy, tint) => {
      let from = Math.max(0, Math.floor(x));
      const to = Math.min(width - 1, Math.floor(x + w));
      for (; from <= to; from++) {
        const part = w > 0 ? busy * (Math.min(from + 1, x + w) - Math.max(from, x)) / w : 0;
        cover[from] += part + 1e-6;
        if (part >= most[from]) { most[from] = part; color[from] = tint; }
      }
    };
    context.setTransform(1, 0, 0, 1, 0, 0);
    rows.forEach((row, place) => {
      cover.fill(0);
      most.fill(0);
      wide.length = 0;
      const { lane } = row, low = data.lanes[lane], high = data.lanes[lane + 1];
      for (let i = Math.max(low, lastAt(data.start, begin, low, high)); i < high && data.start[i] < end; i++) {
        const length = data.length[i];
        if (!isPlain && length < level.width) continue;
        const x = (data.start[i] - begin) * scale, w = length * scale;
        if (x + w < 0) continue;
        if (w < NARROW && !(flags && flags[i])) narrow(x, w, flags ? w * 0.2 : w, data.color[i]);
        else wide.push(i, x, Math.max(w, NARROW));
      }
      const first = level.lanes[lane], last = level.lanes[lane + 1], fading = flags ? 0.25 : 1;
      const top = Math.round((row.y - this.scroll) * ratio), tall = Math.round((row.height - 2) * ratio);
      for (let i = Math.max(first, lastAt(level.start, begin, first, last)); i < last && level.start[i] < end; i++) {
        const x = (level.start[i] - begin) * scale, w = level.length[i] * scale, busy = level.busy[i] * scale * fading;
        if (x + w < 0) continue;
        if (w < NARROW * 4) narrow(x, w, busy, level.color[i]);
        else {
          const from = Math.round(Math.max(x, -2)), to = Math.round(Math.min(x + w, width + 2));
          context.fillStyle = this.styles[level.color[i]].blocks[Math.round(8 * Math.min(1, busy / w))];
          context.fillRect(left + from, top, to - from, tall);
        }
      }
      const at = place * width;
      for (let x = 0; x < width; x++) {
        if (cover[x] === 0) continue;
        const strength = Math.min(1, FAINTEST * fading + (1 - FAINTEST) * cover[x]);
        pixels[at + x] = (this.styles[color[x]].words & 0xffffff) | (Math.round(255 * strength) << 24);
      }
      row.wide = wide.slice();
    });
    this.strip.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(pixels.buffer), width, rows.length), 0, 0);
    context.imageSmoothingEnabled = false;
    rows.forEach((row, place) => {
      const top = Math.round((row.y - this.scroll) * ratio), tall = Math.round((row.height - 2) * ratio);
      context.drawImage(this.strip, 0, place, width, 1, left, top, width, tall);
    });
    this.drawWide(context, rows, left, width, flags);
  }
  drawWide(context, rows, left, width, flags) {
    const { ratio, data } = this, labels = [], hair = Math.round(ratio);
    for (const row of rows) {
      const top = Math.round((row.y - this.scroll) * ratio), tall = Math.round((row.height - 2) * ratio), { wide } = row;
      for (let i = 0; i < wide.length; i += 3) {
        const event = wide[i], from = Math.round(Math.max(wide[i + 1], -4));
        const to = Math.round(Math.min(wide[i + 1] + wide[i + 2], width + 4));
        const style = this.styles[data.color[event]], shade = data.shade[data.name[event]];
        const isFaded = flags && !flags[event];
        context.fillStyle = isFaded ? style.faded : style.fills[shade];
        // A hair between neighbors, so that two of one color are two.
        context.fillRect(left + from, top, to - from > 4 * ratio ? to - from - hair : to - from, tall);
        const seen = Math.min(to, width) - Math.max(from, 0);
        if (seen >= LABEL * ratio) labels.push(event, left + Math.max(from, 0), seen, top + tall / 2, isFaded ? -1 : shade);
      }
      row.wide = null;
    }
    context.font = `${Math.round(11 * ratio)}px ${FONT}`;
    context.textBaseline = "middle";
    for (let i = 0; i < labels.length; i += 5) {
      const [event, x, seen, middle, shade] = labels.slice(i, i + 5), room = seen - 8 * ratio;
      const text = this.fitted(context, data.label(event), room);
      if (!text) continue;
      context.fillStyle = shade < 0 ? this.colors.muted : this.styles[data.color[event]].inks[shade];
      context.fillText(text, x + 4 * ratio, middle, room);
      this.shown.push(text);
    }
  }
  // As much of a label as there is room for.
  fitted(context, text, room) {
    let width = this.widths.get(text);
    if (width === undefined) {
      width = context.measureText(text).width / (11 * this.ratio);
      this.widths.set(text, width);
    }
    const full = width * 11 * this.ratio;
    if (full <= room) return text;
    const num = Math.floor(text.length * room / full) - 1;
    return num >= 2 ? `${text.slice(0, num)}…` : "";
  }
  drawCurve(context, row) {
    const { curve } = row, num = curve.time.length, top = row.y - this.scroll, tall = row.height - 2;
    if (!num) return;
    const width = Math.ceil(this.plot), high = new Float64Array(width).fill(-1), low = new Float64Array(width).fill(-1);
    const y = (value) => Math.round(top + tall - value / curve.highest * (tall - 3));
    const line = (values) => {
      let i = lastAt(curve.time, this.view.start, 0, num), level = i >= 0 ? values[i] : -1;
      const scale = this.plot / (this.view.end - this.view.start);
      for (let x = 0; x < width; x++) {
        high[x] = low[x] = level;
        for (; i + 1 < num && (curve.time[i + 1] - this.view.start) * scale < x + 1; i++) {
          level = values[i + 1];
          high[x] = Math.max(high[x], level);
          low[x] = low[x] < 0 ? level : Math.min(low[x], level);
        }
        if (i === num - 1 && (this.meta.total - this.view.start) * scale < x) level = -1;
      }
    };
    const area = (values, alpha) => {
      context.globalAlpha = alpha;
      context.fillStyle = MEMORY_COLOR;
      for (let x = 0, from = 0; x < width; x = from) {
        while (from < width && values[from] === values[x]) from++;
        if (values[x] >= 0) context.fillRect(this.gutter + x, y(values[x]), from - x, top + tall - y(values[x]));
      }
      context.globalAlpha = 1;
    };
    line(curve.allocated);
    area(high, 0.45);
    area(low, 0.45);
    context.fillStyle = "#0072b2";
    for (let x = 0; x < width; x++) {
      if (high[x] < 0) continue;
      const before = x && high[x - 1] >= 0 ? y(high[x - 1]) : y(high[x]), from = Math.min(before, y(high[x]));
      context.fillRect(this.gutter + x, from, 1, Math.max(1, Math.abs(before - y(high[x]))));
    }
    if (curve.reserved && row.height > LANE) {
      line(curve.reserved);
      context.fillStyle = this.colors.muted;
      for (let x = 0; x < width; x++) if (high[x] >= 0 && x % 6 < 4) context.fillRect(this.gutter + x, y(high[x]), 1, 1);
    }
  }
  drawSpans(context) {
    context.fillStyle = MARK_COLOR;
    context.globalAlpha = 0.13;
    for (const [start, end] of this.spans) {
      const x = this.xAt(start), to = this.xAt(end);
      if (to >= this.gutter && x <= this.width) context.fillRect(x, AXIS, Math.max(2, to - x), this.height);
    }
    context.globalAlpha = 1;
  }
  drawSpanEdges(context) {
    context.fillStyle = MARK_COLOR;
    let last = -9;
    for (const time of this.spans.flat()) {
      const x = Math.round(this.xAt(time));
      if (x >= this.gutter && x <= this.width && Math.abs(x - last) > 2) context.fillRect(x, AXIS, 1, this.height);
      last = x;
    }
  }
  drawBar(context) {
    if (this.contentHeight <= this.height) return;
    const room = this.height - AXIS, all = this.contentHeight;
    context.fillStyle = this.colors.line;
    context.fillRect(this.width - BAR - 2, AXIS, BAR + 2, room);
    context.fillStyle = this.colors.muted;
    context.fillRect(this.width - BAR, AXIS + this.scroll / all * room, BAR - 2, Math.max(24, (this.height / all) * room));
  }
  // What changes without the view: pointer, hover, selection, arrow.
  drawOver(context) {
    const { colors, data } = this;
    context.save();
    context.beginPath();
    context.rect(this.gutter, AXIS, this.plot, this.height - AXIS);
    context.clip();
    const outline = (event, color, line) => {
      const box = this.boxOf(event);
      if (!box) return;
      context.strokeStyle = color;
      context.lineWidth = line;
      context.strokeRect(box.x, box.y + 0.5, Math.max(box.width, 2), box.height - 1);
    };
    if (this.hovered >= 0) outline(this.hovered, colors.fg, 1);
    if (this.chosen >= 0) {
      const launch = data.launch[this.chosen] - 1;
      if (launch >= 0) this.drawArrow(context, launch, this.chosen);
      else for (const kernel of this.kernels.slice(0, 40)) this.drawArrow(context, this.chosen, kernel);
      outline(this.chosen, colors.bg, 4);
      outline(this.chosen, colors.fg, 2);
    }
    if (this.picked) {
      const [from, to] = this.picked.map((time) => this.xAt(time)).sort((a, b) => a - b);
      context.globalAlpha = 0.2;
      context.fillStyle = "#0072b2";
      context.fillRect(from, AXIS, to - from, this.height);
      context.globalAlpha = 1;
      context.fillStyle = colors.fg;
      context.font = `12px ${FONT}`;
      context.textBaseline = "top";
      context.fillText(duration(Math.abs(this.picked[1] - this.picked[0]) * this.meta.tick_ns), from + 6, AXIS + 6);
    } else if (this.pointer && !this.drag) {
      context.fillStyle = colors.muted;
      context.globalAlpha = 0.6;
      context.fillRect(Math.round(this.pointer), AXIS, 1, this.height);
    }
    context.restore();
    if (this.pointer && !this.drag) this.drawClock(context);
  }
  drawClock(context) {
    const text = exactly(Math.max(0, this.timeAt(this.pointer)) * this.meta.tick_ns, (this.view.end - this.view.start) * this.meta.tick_ns);
    context.font = `11px ${FONT}`;
    const width = context.measureText(text).width + 10, x = Math.min(Math.max(this.pointer - width / 2, this.gutter), this.width - width - 2);
    context.fillStyle = this.colors.fg;
    context.fillRect(x, AXIS - 21, width, 17);
    context.fillStyle = this.colors.bg;
    context.textBaseline = "middle";
    context.fillText(text, x + 5, AXIS - 12);
  }
  boxOf(event) {
    const lane = this.data.laneOf(event), track = this.meta.tracks[this.data.trackOfLane[lane]];
    const row = this.rows.find((each) => each.lane === lane) || this.rows.find((each) => each.lane === track.first_lane);
    if (!row) return null;
    const x = this.xAt(this.data.start[event]), to = this.xAt(this.data.end(event));
    const from = Math.max(x, this.gutter - 20), until = Math.min(to, this.gutter + this.plot + 20);
    return { x: from, width: until - from, y: row.y - this.scroll, height: row.height - 2, left: x, right: to };
  }
  drawArrow(context, launch, kernel) {
    const from = this.boxOf(launch), to = this.boxOf(kernel);
    if (!from || !to) return;
    const up = to.y < from.y, x1 = Math.max(-1e4, Math.min(1e4, (from.left + from.right) / 2)), y1 = up ? from.y : from.y + from.height;
    const x2 = Math.max(-1e4, Math.min(1e4, to.left)), y2 = to.y + to.height / 2, bend = Math.max(24, Math.abs(x2 - x1) * 0.4);
    for (const [color, line] of [[this.colors.bg, 4], [MARK_COLOR, 1.8]]) {
      context.strokeStyle = color;
      context.lineWidth = line;
      context.beginPath();
      context.moveTo(x1, y1);
      context.bezierCurveTo(x1, y1 + (up ? -1 : 1) * Math.min(60, Math.abs(y2 - y1) / 2), x2 - bend, y2, x2 - 3, y2);
      context.stroke();
    }
    context.fillStyle = MARK_COLOR;
    context.beginPath();
    context.moveTo(x2, y2);
    context.lineTo(x2 - 8, y2 - 4.5);
    context.lineTo(x2 - 8, y2 + 4.5);
    context.fill();
  }
}
