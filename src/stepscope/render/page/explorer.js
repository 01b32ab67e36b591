// A sweep's points over any two of its axes: the reader chooses the figure, the axes and the fixed values.

/** Escape a name for Plotly, which reads markup. */
const words = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

function explorer(root, data) {
  const points = data.statuses.map((_, point) => point);
  const state = { figure: 0, x: data.x, series: data.series, kind: "lines", log: data.figures[0]?.is_log, held: {} };
  const controls = element("div", "controls");
  const choices = [];
  let shape = null;
  const legend = element("div", "legend");
  const plot = element("div", "plot");
  const status = element("p", "foot");
  plot.style.height = "420px";
  root.append(controls, legend, plot, status);

  const others = () => data.axes.map((_, at) => at).filter((at) => at !== state.x && at !== state.series);
  const isHeld = (point) => others().every((at) => data.places[at][point] === state.held[at]);

  function choice(title, options, chosen, changed) {
    const label = element("label", "", title);
    const select = element("select");
    for (const [value, text] of options) {
      const option = element("option", "", text);
      option.value = value;
      select.append(option);
    }
    choices.push({ title, select, follow: () => (select.value = String(chosen())) });
    select.addEventListener("change", () => {
      changed(select.value === "" ? null : Number.isNaN(Number(select.value)) ? select.value : Number(select.value));
      update();
    });
    label.append(select);
    controls.append(label);
  }

  /** The controls as the state has them. They are rebuilt only if others are needed, so that the one in use keeps its focus. */
  function drawControls() {
    const wanted = JSON.stringify([state.x, state.series, state.kind]);
    if (wanted !== shape) {
      const focused = choices.find(({ select }) => select === document.activeElement)?.title;
      shape = wanted;
      makeControls();
      choices.find(({ title }) => title === focused)?.select.focus();
    }
    for (const { follow } of choices) follow();
  }

  function makeControls() {
    controls.replaceChildren();
    choices.length = 0;
    const axes = data.axes.map((axis, at) => [at, axis.title]);
    choice("figure", data.figures.map((figure, at) => [at, figure.title]), () => state.figure, (at) => {
      state.figure = at;
      state.log = data.figures[at].is_log;
    });
    if (axes.length) {
      choice("x axis", axes, () => state.x, (at) => {
        if (at === state.series) state.series = state.x;
        state.x = at;
      });
    }
    if (axes.length > 1) {
      choice("color or rows", [["", "none"], ...axes], () => state.series ?? "", (at) => {
        if (at === state.x) state.x = state.series ?? others()[0];
        state.series = at;
      });
      if (state.series !== null) {
        choice("chart", [["lines", "lines"], ["heat", "heat map"]], () => state.kind, (kind) => (state.kind = kind));
      }
    }
    if (state.kind === "lines") {
      choice("scale", [["linear", "linear"], ["log", "logarithmic"]], () => (state.log ? "log" : "linear"), (scale) => (state.log = scale === "log"));
    }
    for (const at of others()) {
      const labels = data.axes[at].labels.map((label, place) => [place, label]);
      if (labels.length > 1) choice(data.axes[at].title, labels, () => state.held[at], (place) => (state.held[at] = place));
    }
  }

  /** Fix the other axes where most points are, unless the reader's choice has points. */
  function hold() {
    const free = others();
    if (points.some((point) => isHeld(point)) && free.every((at) => at in state.held)) return;
    const counts = new Map();
    for (const point of points) {
      const key = free.map((at) => data.places[at][point]).join(",");
      counts.set(key, (counts.get(key) ?? 0) + (data.statuses[point] === "ok" ? 1 : 0.5));
    }
    const best = [...counts].reduce((one, other) => (other[1] > one[1] ? other : one))[0].split(",").map(Number);
    free.forEach((at, number) => (state.held[at] = best[number]));
  }

  /** The chosen figure in a unit that suits its largest value. */
  function scaled(shown) {
    const figure = data.figures[state.figure];
    const known = shown.filter((point) => figure.values[point] !== null);
    const top = known.reduce((one, other) => (Math.abs(figure.values[other]) > Math.abs(figure.values[one]) ? other : one), known[0] ?? 0);
    const { divisor, axis } = figure.units[figure.unit[top]];
    const divided = (values) => values && values.map((value) => (value === null ? null : value / divisor));
    return { ...figure, axis, values: divided(figure.values), low: divided(figure.low), high: divided(figure.high) };
  }

  /** A logarithmic axis with ticks at 1, 2 and 5 of every power of ten. */
  function factors(figure, shown) {
    const found = shown.map((point) => figure.values[point]).filter((value) => value > 0);
    if (!found.length) return {};
    const [low, high] = [Math.min(...found), Math.max(...found)];
    const tickvals = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)); power++) {
      for (const factor of [1, 2, 5]) tickvals.push(Number(`${factor}e${power}`));
    }
    const ticktext = tickvals.map((value) => value.toLocaleString("en", { maximumSignificantDigits: 3 }));
    return { type: "log", tickmode: "array", tickvals, ticktext, range: [Math.log10(low / 1.4), Math.log10(high * 1.4)] };
  }

  function hover(point) {
    const { title, texts } = data.figures[state.figure];
    const more = data.statuses[point] === "ok" ? `${title}: <b>${words(texts[point])}</b>` : `<b>${words(data.statuses[point])}</b> ${words(data.reasons[point].slice(0, 120))}`;
    const marks = [data.marks[point], data.noisy[point] ? "noisy" : ""].filter(Boolean).join(", ");
    return `${words(data.names[point].slice(0, 200))}<br>${more}${marks ? `<br>${marks}` : ""}`;
  }

  function axis(at) {
    const { title, labels, values, is_log } = data.axes[at];
    const made = { title: { text: words(title) }, tickmode: "array", ticktext: labels.map(words), zeroline: false };
    if (values && is_log && values.every((value) => value > 0)) {
      const ends = [Math.log10(Math.min(...values)) - 0.15, Math.log10(Math.max(...values)) + 0.15];
      return { ...made, type: "log", tickvals: values, range: ends };
    }
    return { ...made, tickvals: values ?? labels.map((_, place) => place) };
  }

  function lines(shown) {
    const figure = scaled(shown);
    const { values } = data.axes[state.x];
    const isLog = axis(state.x).type === "log";
    const groups = state.series === null ? [null] : data.axes[state.series].labels.map((_, place) => place);
    const layout = { hovermode: "closest", xaxis: axis(state.x), annotations: [], barmode: "group", bargap: 0.3,
      yaxis: { title: { text: figure.axis }, rangemode: "tozero", zeroline: false, exponentformat: "none", ...(state.log ? factors(figure, shown) : {}) } };
    const levels = new Map();
    const nameOf = (group) => (group === null ? figure.title : data.axes[state.series].labels[group]);
    const traces = groups.map((group, number) => {
      const own = shown.filter((point) => group === null || data.places[state.series][point] === group);
      own.sort((one, other) => data.places[state.x][one] - data.places[state.x][other]);
      const x = own.map((point) => (values ? values[data.places[state.x][point]] : data.places[state.x][point]));
      const color = data.palette[number % data.palette.length];
      own.forEach((point, at) => {
        if (figure.values[point] !== null) return;
        const level = (levels.get(x[at]) ?? -1) + 1;
        levels.set(x[at], level);
        layout.annotations.push({ x: isLog ? Math.log10(x[at]) : x[at], yref: "paper", y: 1 - 0.07 * level, yanchor: "top",
          text: words(data.statuses[point] === "ok" ? "–" : data.statuses[point]), showarrow: false, font: { color } });
      });
      const ends = figure.low && { type: "data", symmetric: false, thickness: 1.2, width: 3,
        array: own.map((point) => figure.high[point] - figure.values[point]),
        arrayminus: own.map((point) => figure.values[point] - figure.low[point]) };
      return { type: values || state.log ? "scatter" : "bar", mode: values ? "lines+markers" : "markers", x, y: own.map((point) => figure.values[point]),
        name: words(nameOf(group)), meta: nameOf(group),
        marker: { color, size: 7 }, line: { color, width: 1.8 }, hoverinfo: "text", hovertext: own.map(hover),
        ...(ends ? { error_y: ends } : {}) };
    });
    return { data: traces.filter((trace) => trace.x.length), layout, narrow: {}, height: 420 };
  }

  function heat(shown) {
    const figure = scaled(shown);
    const across = data.axes[state.x].labels;
    const down = data.axes[state.series].labels;
    const at = new Map(shown.map((point) => [`${data.places[state.series][point]},${data.places[state.x][point]}`, point]));
    const grid = (of) => down.map((_, y) => across.map((_, x) => (at.has(`${y},${x}`) ? of(at.get(`${y},${x}`)) : null)));
    const layout = {
      coloraxis: { colorscale: "Cividis", colorbar: { title: { text: figure.axis, side: "top" }, thickness: 12 } },
      xaxis: { title: { text: words(data.axes[state.x].title) }, tickvals: across.map((_, x) => x), ticktext: across.map(words), showgrid: false, zeroline: false },
      yaxis: { title: { text: words(data.axes[state.series].title) }, tickvals: down.map((_, y) => y), ticktext: down.map(words), showgrid: false, zeroline: false, autorange: "reversed" },
      annotations: [], shapes: [],
    };
    for (const point of shown) {
      if (figure.values[point] !== null) continue;
      const [x, y] = [data.places[state.x][point], data.places[state.series][point]];
      layout.shapes.push({ type: "rect", x0: x - 0.47, x1: x + 0.47, y0: y - 0.45, y1: y + 0.45, layer: "below", line: { dash: "dot", width: 1 } });
      layout.annotations.push({ x, y, showarrow: false, text: words(data.statuses[point] === "ok" ? "–" : data.statuses[point]) });
    }
    const trace = { type: "heatmap", x: across.map((_, x) => x), y: down.map((_, y) => y), z: grid((point) => figure.values[point]),
      text: grid((point) => words(figure.cells[point])), texttemplate: "%{text}", hoverinfo: "text",
      hovertext: grid(hover), xgap: 2, ygap: 2, coloraxis: "coloraxis" };
    return { data: [trace], layout, narrow: { "coloraxis.showscale": false }, height: Math.max(220, 90 + 38 * down.length), min_width: 130 + 80 * across.length };
  }

  async function update() {
    hold();
    drawControls();
    if (state.x === null || !data.figures.length) {
      status.textContent = "All points of this sweep have the same settings.";
      return;
    }
    const shown = points.filter(isHeld);
    const figure = state.kind === "heat" && state.series !== null ? heat(shown) : lines(shown);
    legend.replaceChildren();
    if (figure.data.length > 1) {
      for (const trace of figure.data) {
        const item = element("span", "");
        const box = element("i", "box");
        box.style.color = trace.marker.color;
        item.append(box, element("b", "", trace.meta));
        legend.append(item);
      }
    }
    plot.style.height = `${figure.height}px`;
    const missing = shown.filter((point) => data.statuses[point] !== "ok").length;
    status.textContent = `${shown.length} of ${points.length} points${missing ? `, ${missing} without a result` : ""}.`;
    draw(plot, figure, await plotly());
    sizes.observe(plot);
  }

  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    update();
  });
  seen.observe(root);
}
