// Starts everything once the file is read; the timeline starts when its section opens.

let timeline = null;

/** The page's timeline, unpacked once; null if there is none. */
function openTimeline() {
  const root = document.getElementById("timeline-root");
  if (!root || typeof StepscopeTimeline === "undefined") return Promise.resolve(null);
  timeline ??= unpacked("timeline-blob").then((bytes) => {
    root.replaceChildren();
    return new StepscopeTimeline(root, page.data.timeline, bytes);
  });
  return timeline;
}

/** Show where a finding is on the timeline. */
async function showPlaces(text) {
  const spans = text.split(" ").map((span) => span.split("-")); // as text: nanoseconds since 1970 exceed a double's precision
  go("timeline");
  show("timeline");
  const opened = await openTimeline();
  opened?.show(spans[0][0], spans[0][1], spans);
}

function start() {
  page.data = JSON.parse(document.getElementById("data").textContent);
  for (const root of document.querySelectorAll("[data-table]")) table(root, page.data.tables[root.dataset.table]);
  for (const root of document.querySelectorAll("[data-chart]")) chart(root, page.data.charts[root.dataset.chart]);
  for (const root of document.querySelectorAll("[data-explorer]")) {
    explorer(root, page.data.explorers[root.dataset.explorer]);
  }
  for (const one of document.querySelectorAll("[data-png]")) {
    one.addEventListener("click", () => savePicture(one.dataset.png, one.dataset.name));
  }
  for (const one of document.querySelectorAll("[data-places]")) {
    one.addEventListener("click", () => showPlaces(one.dataset.places));
  }
  const timelineShown = (section) => section?.querySelector("#timeline-root") && openTimeline();
  onShow.push(timelineShown);
  timelineShown(sections[current()]);
  document.documentElement.classList.add("ready");
}

document.addEventListener("DOMContentLoaded", start);
