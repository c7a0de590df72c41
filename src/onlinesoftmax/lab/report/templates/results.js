// The charts of recorded measurements.

const MEASURE_NOTES = {
  gbps: "GB/s counts each tensor that must be read or written once. Higher is better.",
  ratio: "The speed divided by that of the copy in the same run: 1 is as fast as a copy. A call with its gradient moves other bytes than a copy.",
  us: "The median time of a call, in microseconds. Lower is better.",
  error: "The largest absolute error against float64. The grey ticks are the error of PyTorch's, or JAX's, own function on the same input. Errors of exactly 0 are not drawn.",
  mb: "The peak memory of a call beyond its input and its results, in MB. Negative where a library writes over its input. Recorded on GPUs in PyTorch only.",
};

async function panels(container, record, measure, specs) {
  forget(container);
  container.replaceChildren();
  const drawings = [];
  for (const panel of record.panels) {
    const points = panel.points.filter((point) => point[measure] != null);
    if (!points.some((point) => point.who !== "copy")) continue;
    const figure = make("figure", "", { class: "panel" });
    const chart = make("div", "", { class: "chart" });
    figure.append(make("figcaption", panel.title), chart);
    container.append(figure);
    const known = specs[measure].params?.find((each) => each.name === "shown")?.value ?? [];
    const here = new Set(points.map((point) => point.who));
    drawings.push(draw(chart, specs[measure], { points: panel.points }, { ...panel.ends, shown: known.filter((who) => here.has(who)) }));
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
    byId("measure-note").textContent = MEASURE_NOTES[measure.value];
    details(records[record.value]);
    return panels(byId("panels"), records[record.value], measure.value, specs);
  };
  record.addEventListener("change", results);
  measure.addEventListener("change", results);
  await results();
}
