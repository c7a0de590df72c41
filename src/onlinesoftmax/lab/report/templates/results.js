// The charts of recorded measurements.

const MEASURE_NOTES = {
  gbps: "GB/s counts each tensor that must be read or written once. Higher is better.",
  ratio: "The speed divided by that of the copy, or of the yardstick, in the same run: 1 is as fast. A call with its gradient moves other bytes than a copy.",
  us: "The median time of a call, in microseconds. Lower is better.",
  error: "The largest absolute error against float64. The grey ticks are the error of PyTorch's, or JAX's, own function on the same input. Errors of exactly 0 are not drawn.",
  mb: "The peak memory of a call beyond its input and its results, in MB. Negative where a library writes over its input. Recorded on GPUs in PyTorch only.",
};

// A link to the points of a chart as a file of comma-separated values, which is made when it is followed.
function download(record, panel) {
  const link = make("a", "Data (CSV)", { href: "#", class: "data", download: `${record.name.replace(/\.json$/, "")} ${panel.title}.csv`.replace(/[ ,]+/g, "-") });
  link.addEventListener("click", () => {
    const names = [...new Set(panel.points.flatMap(Object.keys))];
    const lines = [names, ...panel.points.map((point) => names.map((name) => point[name] ?? ""))];
    const text = lines.map((line) => line.map((cell) => (/[",]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell)).join(",")).join("\n");
    URL.revokeObjectURL(link.href);
    link.href = URL.createObjectURL(new Blob([text + "\n"], { type: "text/csv" }));
  });
  return link;
}

async function panels(container, record, measure, specs) {
  forget(container);
  container.replaceChildren();
  const drawings = [];
  for (const panel of record.panels) {
    const points = panel.points.filter((point) => point[measure] != null);
    if (!points.some((point) => point.who !== "copy")) continue;
    const figure = make("figure", "", { class: "panel" });
    const chart = make("div", "", { class: "chart" });
    const specification = specs[panel.listed ? `listed ${measure}` : measure];
    figure.append(make("figcaption", panel.title), make("p", panel.outcome, { class: "note" }), chart, download(record, panel));
    container.append(figure);
    const known = specification.params?.find((each) => each.name === "shown")?.value ?? [];
    const here = new Set(points.map((point) => point.who));
    drawings.push(draw(chart, panel.listed ? { ...specification, height: 20 * new Set(points.map((point) => point.shape)).size } : specification, { points: panel.points }, { ...panel.ends, shown: known.filter((who) => here.has(who)) }));
  }
  if (!drawings.length) container.append(make("p", "This record has no such measurement. The table below has every figure of the record."));
  await Promise.all(drawings);
}

function details(record) {
  pairs(byId("record-facts"), record.facts);
  byId("record-notes").replaceChildren(...record.notes.map((note) => make("li", note)));
  const head = make("tr"), body = make("tbody"), start = make("thead");
  const numbers = new Set(record.numbers);
  const kind = (i) => (numbers.has(record.header[i]) ? { class: "number" } : {});
  head.append(...record.header.map((name, i) => make("th", name, { scope: "col", ...kind(i) })));
  start.append(head);
  for (const row of record.rows) {
    const line = make("tr");
    line.append(...row.map((cell, i) => make("td", cell, kind(i))));
    body.append(line);
  }
  byId("record-table").replaceChildren(start, body);
}

async function showResults(records, specs) {
  const record = byId("record"), measure = byId("measure");
  const results = () => {
    const has = (name) => records[record.value].panels.some(({ points }) => points.some((point) => point.who !== "copy" && point[name] != null));
    for (const option of measure.options) option.disabled = !has(option.value);
    if (measure.selectedOptions[0].disabled) measure.value = [...measure.options].find((option) => !option.disabled)?.value ?? measure.value;
    byId("measure-note").textContent = MEASURE_NOTES[measure.value];
    byId("record-link").href = `#${new URLSearchParams({ record: records[record.value].name, measure: measure.value })}`;
    details(records[record.value]);
    return panels(byId("panels"), records[record.value], measure.value, specs);
  };
  record.addEventListener("change", results);
  measure.addEventListener("change", results);
  // Takes the record that the address names, as #record=h200-forward.json&measure=us.
  const follow = () => {
    const named = new URLSearchParams(location.hash.slice(1)), place = records.findIndex(({ name }) => name === named.get("record"));
    if (place >= 0) record.value = place;
    if ([...measure.options].some(({ value }) => value === named.get("measure"))) measure.value = named.get("measure");
    return results();
  };
  addEventListener("hashchange", () => { if (location.hash.includes("record=")) follow(); });
  await follow();
}
