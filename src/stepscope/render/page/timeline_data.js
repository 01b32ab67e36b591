// The timeline's data: the columns that document/timeline packs, and how times, bytes and colors are written.
// Times are ticks since the trace's first event; meta.tick_ns nanoseconds each.

// -- columns

function column(bytes, place) {
  const numbers = new Uint32Array(place.num);
  for (let plane = 0; plane < place.planes; plane++) {
    const from = place.at + plane * place.num, shift = 8 * plane;
    for (let i = 0; i < place.num; i++) numbers[i] |= bytes[from + i] << shift;
  }
  if (place.delta) {
    let last = 0;
    for (let i = 0; i < place.num; i++) {
      const coded = numbers[i];
      last = (last + ((coded >>> 1) ^ -(coded & 1))) >>> 0;
      numbers[i] = last;
    }
  }
  return numbers;
}

function texts(bytes, place) {
  return JSON.parse(new TextDecoder().decode(bytes.subarray(place.at, place.at + place.bytes)));
}

function columns(bytes, places) {
  const found = {};
  for (const [name, place] of Object.entries(places)) if (place && place.planes) found[name] = column(bytes, place);
  return found;
}

// The last place in [from, to) whose number is not above a value, or from - 1.
function lastAt(numbers, value, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (numbers[middle] <= value) from = middle + 1; else to = middle;
  }
  return from - 1;
}

// -- text and color

function digits(value, most = 4) {
  const places = Math.max(0, most - 1 - Math.floor(Math.log10(Math.abs(value) || 1)));
  const text = value.toFixed(Math.min(places, 6));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function duration(ns) {
  const size = Math.abs(ns);
  if (size < 999.5) return `${Math.round(ns)} ns`;
  if (size < 999950) return `${digits(ns / 1e3)} µs`;
  return size < 999950000 ? `${digits(ns / 1e6)} ms` : `${digits(ns / 1e9)} s`;
}

function bytesText(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1023.5 && unit < 4) { value /= 1024; unit++; }
  return `${digits(value, 3)} ${units[unit]}`;
}

const whole = (number) => number.toLocaleString("en-US");
const counted = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

function rgbOf(hex) {
  const short = hex.length === 4;
  return [0, 1, 2].map((i) => parseInt(short ? hex[1 + i] + hex[1 + i] : hex.slice(1 + 2 * i, 3 + 2 * i), 16));
}
const mixed = (color, other, share) => color.map((value, i) => Math.round(value + (other[i] - value) * share));
const css = ([red, green, blue]) => `rgb(${red},${green},${blue})`;
const lightness = ([red, green, blue]) => (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255;

// -- the data

class Data {
  constructor(meta, buffer) {
    const bytes = new Uint8Array(buffer);
    Object.assign(this, columns(bytes, meta.events));
    this.meta = meta;
    this.num = this.start.length;
    this.strings = texts(bytes, meta.strings);
    this.labels = texts(bytes, meta.labels);
    this.steps = columns(bytes, meta.steps);
    this.levels = meta.levels.map((level) => ({ width: level.width, ...columns(bytes, level) }));
    this.curves = meta.memory.map((curve) => ({ ...curve, ...columns(bytes, curve) }));
    for (const curve of this.curves) {
      curve.highest = 1;
      for (const values of [curve.allocated, curve.reserved || []])
        for (const value of values) if (value > curve.highest) curve.highest = value;
    }
    this.kinds = meta.kinds;
    this.trackOfLane = new Uint32Array(meta.num_lanes);
    meta.tracks.forEach((track, number) => {
      this.trackOfLane.fill(number, track.first_lane, track.first_lane + track.num_lanes);
    });
    this.shade = new Uint8Array(this.strings.length);
    this.strings.forEach((text, number) => {
      let hash = 0;
      for (let i = 0; i < Math.min(text.length, 80); i++) hash = (hash * 31 + text.charCodeAt(i)) >>> 0;
      this.shade[number] = hash % SHADES.length;
    });
  }
  label(event) { return this.labels[this.name[event]] || this.strings[this.name[event]]; }
  text(column, event) { return this.strings[this[column][event]]; }
  laneOf(event) { return lastAt(this.lanes, event, 0, this.lanes.length); }
  isCopy(event) { return this.meta.tracks[this.trackOfLane[this.laneOf(event)]].is_copy; }
  end(event) { return this.start[event] + this.length[event]; }
  // The event of a lane that is open at a time, or the longest one within reach of it.
  at(lane, time, reach) {
    const from = this.lanes[lane], to = this.lanes[lane + 1];
    let best = -1;
    for (let i = lastAt(this.start, time + reach, from, to); i >= from; i--) {
      if (this.end(i) < time - reach) break;
      if (best < 0 || this.length[i] > this.length[best]) best = i;
    }
    return best;
  }
  blockAt(level, lane, time, reach) {
    const from = level.lanes[lane], to = level.lanes[lane + 1];
    const i = lastAt(level.start, time + reach, from, to);
    return i >= from && level.start[i] + level.length[i] >= time - reach ? i : -1;
  }
  kernelsOf(launch) {
    const found = [];
    for (let i = 0; i < this.num; i++)
      if (this.launch[i] === launch + 1 && !this.isCopy(i)) found.push(i);
    return found;
  }
  // The GPU work that was launched within a host event.
  launchedIn(event) {
    const track = this.meta.tracks[this.trackOfLane[this.laneOf(event)]], found = [];
    const from = this.lanes[track.first_lane], to = this.lanes[track.first_lane + track.num_lanes];
    for (let i = 0; i < this.num; i++) {
      const call = this.launch[i] - 1;
      if (call < from || call >= to || this.start[call] < this.start[event] || this.end(call) > this.end(event)) continue;
      if (!this.isCopy(i)) found.push(i);
    }
    return found;
  }
  around(event) {
    const lane = this.laneOf(event), track = this.meta.tracks[this.trackOfLane[lane]], found = [];
    for (let above = lane - 1; above >= track.first_lane; above--) {
      const i = lastAt(this.start, this.start[event], this.lanes[above], this.lanes[above + 1]);
      if (i >= this.lanes[above] && this.end(i) >= this.end(event)) found.push(i);
    }
    return found;
  }
}

const unitOf = (ns) => (ns >= 1e9 ? ["s", 1e9] : ns >= 1e6 ? ["ms", 1e6] : ns >= 1e3 ? ["µs", 1e3] : ["ns", 1]);

// A time with as many digits as the range on screen gives sense to.
function exactly(ns, range = ns / 1000) {
  const [unit, size] = unitOf(ns);
  const places = Math.max(0, Math.min(9, Math.ceil(Math.log10(size / Math.max(range / 1000, 1)))));
  const text = (ns / size).toFixed(places);
  return `${places ? text.replace(/\.?0+$/, "") : text} ${unit}`;
}
