// Tables: sorted by value, filtered, shown in part or in full.

const FILTER_FROM = 12;
const collator = new Intl.Collator(undefined, { numeric: true });

function table(root, data) {
  const state = { column: null, ascending: false, filter: "", all: false };
  const body = root.querySelector("tbody");
  const firstRows = body.rows.length;
  for (const column of data.columns) column.keys = column.raw?.map((text) => (text === "" ? null : Number(text)));
  const heads = [...root.querySelectorAll("th button")];
  const tools = root.querySelector(".tools");
  let more = null;

  function order() {
    const words = state.filter.toLowerCase();
    let rows = Array.from({ length: data.rows }, (_, row) => row);
    if (words) rows = rows.filter((row) => data.columns.some((one) => one.texts[row].toLowerCase().includes(words)));
    if (state.column === null) return rows;
    const { keys, texts } = data.columns[state.column];
    const sign = state.ascending ? 1 : -1;
    return rows.sort((one, other) => {
      if (!keys) return sign * collator.compare(texts[one], texts[other]);
      if (keys[one] === null || keys[other] === null) return (keys[one] === null) - (keys[other] === null);
      return sign * (keys[one] - keys[other]);
    });
  }

  function draw() {
    const rows = order();
    const shown = state.all ? rows : rows.slice(0, firstRows);
    body.replaceChildren(
      ...shown.map((row) => {
        const line = element("tr");
        for (const column of data.columns) line.append(element("td", column.keys ? "figure" : "", column.texts[row]));
        return line;
      }),
    );
    heads.forEach((head, number) => {
      const sorted = number === state.column ? (state.ascending ? "ascending" : "descending") : "none";
      head.parentElement.setAttribute("aria-sort", sorted);
    });
    if (more) {
      more.hidden = rows.length <= firstRows;
      more.textContent = state.all ? `Show the first ${firstRows}` : `Show all ${rows.length.toLocaleString("en")}`;
    }
  }

  heads.forEach((head, number) =>
    head.addEventListener("click", () => {
      const isFigure = Boolean(data.columns[number].keys);
      state.ascending = state.column === number ? !state.ascending : !isFigure;
      state.column = number;
      draw();
    }),
  );
  // A long name is cut to one line; a click opens it.
  body.addEventListener("click", (event) => event.target.closest("td")?.classList.toggle("open"));
  if (data.rows > FILTER_FROM) {
    const filter = element("input", "filter");
    filter.type = "search";
    filter.placeholder = "Filter";
    filter.setAttribute("aria-label", "Show only rows with this text");
    filter.addEventListener("input", () => {
      state.filter = filter.value;
      draw();
    });
    tools.append(filter);
  }
  tools.append(button("CSV", "quiet", () => saveCsv(data, order())));
  if (data.rows > firstRows) {
    more = button(`Show all ${data.rows.toLocaleString("en")}`, "quiet more", () => {
      state.all = !state.all;
      draw();
    });
    root.querySelector(".scroll").after(more);
  }
}

/** Save the CSV cells that the page carries: full precision, and no formulas. */
function saveCsv(data, rows) {
  const quoted = (text) => (/[",]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const cellOf = (column, row) => quoted(column.raw?.[row] ?? column.csv?.[row] ?? column.texts[row]);
  const lines = [data.columns.map((column) => quoted(column.name))];
  for (const row of rows) lines.push(data.columns.map((column) => cellOf(column, row)));
  const text = lines.map((line) => `${line.join(",") || '""'}\n`).join(""); // an empty line would not count as a row
  const href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  download(`${data.id}.csv`, href);
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}
