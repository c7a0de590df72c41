"use strict";
// Unpacks the data, and draws Vega-Lite charts in the colours of the page.

const byId = (id) => document.getElementById(id);

async function unpack() {
  const packed = Uint8Array.from(atob(byId("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function theme() {
  const ink = colour("--ink"), soft = colour("--soft"), line = colour("--line");
  return {
    background: "transparent", font: "system-ui, sans-serif", view: { stroke: null },
    axis: { labelColor: soft, titleColor: soft, domainColor: line, tickColor: line, gridColor: line, gridOpacity: 0.6,
      titleFontWeight: "normal", titleFontSize: 12, labelFontSize: 11, labelSeparation: 4 },
    legend: { labelColor: ink, titleColor: soft, labelFontSize: 12, symbolSize: 80 },
    text: { color: ink }, rule: { color: soft },
  };
}

// The charts on the page: how to draw each again when the theme changes.
const drawn = new Map();

// Draws a chart into an element; data maps the names of its data sets to rows.  Returns the view.
async function draw(element, specification, data, signals = {}) {
  const again = () => draw(element, specification, drawn.get(element).data, drawn.get(element).signals);
  drawn.get(element)?.result?.finalize();
  const state = { data, signals, again };
  drawn.set(element, state);
  const result = await vegaEmbed(element, structuredClone(specification), {
    mode: "vega-lite", actions: false, renderer: "svg", config: theme(), tooltip: { theme: "custom" },
    patch: (vega) => {
      for (const set of vega.data) if (state.data[set.name]) set.values = state.data[set.name];
      // The legend of a narrow chart has two columns.
      const least = { top: 520, bottom: 400 };
      for (const legend of vega.legends ?? []) if (element.clientWidth < least[legend.orient]) Object.assign(legend, { columns: 2, labelLimit: 90 });
      for (const signal of vega.signals) if (signal.name === "ink") signal.value = colour("--ink");
      for (const signal of vega.signals) if (signal.name in state.signals) signal.value = state.signals[signal.name];
      return vega;
    },
  });
  if (drawn.get(element) !== state) { result.finalize(); return null; }
  state.result = result;
  return result.view;
}

// Replaces the data of a chart that is drawn; draws it first if it is not there yet.
async function redraw(element, specification, data, signals) {
  const state = drawn.get(element);
  if (!state?.result) return draw(element, specification, data, signals);
  Object.assign(state, { data, signals });
  const view = state.result.view;
  for (const [name, value] of Object.entries(signals)) view.signal(name, value);
  for (const [name, rows] of Object.entries(data)) view.data(name, rows);
  return view.runAsync();
}

function forget(container) {
  for (const [element, state] of drawn) {
    if (container.contains(element)) { state.result?.finalize(); drawn.delete(element); }
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const state of [...drawn.values()]) state.again();
});

// Small helpers for the page.

function make(name, text = "", attributes = {}) {
  const element = document.createElement(name);
  element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

async function copy(text, status) {
  try {
    await navigator.clipboard.writeText(text);
    status.textContent = "Copied.";
  } catch {
    status.textContent = `This browser copies nothing from here: ${text}`;
  }
}

function pairs(list, items) {
  list.replaceChildren(...items.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

function fill(select, values, wanted, label = String) {
  select.replaceChildren(...values.map((value) => new Option(label(value), value)));
  select.value = values.map(String).includes(String(wanted)) ? wanted : values[0];
}
