// The picker: looks up the planner's answers.  Nothing about plans is computed here.

const FIELDS = ["framework", "gpu", "operation", "option", "dtype", "rows"];
const [COLS, PLAN, REASON, BYTES, FLOOR, ESTIMATE, FACTS, OTHERS] = Array(8).keys();

// Rows of these kinds begin on other addresses, so a length says little about a neighbour of another kind.
const KINDS = { aligned: (step) => `multiples of ${step}, or less`, even: () => "other even lengths", odd: () => "odd lengths" };
const english = (number) => number.toLocaleString("en");

class Picker {
  constructor(data, specs) {
    this.data = data;
    this.specs = specs;
    this.keys = Object.keys(data.combinations).map((key) => key.split(" "));
    this.wanted = this.keys.some((key) => key[5] === "4096") ? [, , , , , "4096"] : [];
    this.asked = 4096;
    this.step_ = Number(byId("alignment").dataset.step);
    fill(byId("alignment"), Object.keys(KINDS), "aligned", (kind) => KINDS[kind](this.step_));
    for (const [i, field] of FIELDS.entries()) {
      byId(field).addEventListener("change", () => { this.wanted[i] = byId(field).value; this.choose(); });
    }
    byId("alignment").addEventListener("change", () => this.choose());
    byId("length").addEventListener("input", () => this.go(this.nearest(2 ** Number(byId("length").value))));
    byId("length").addEventListener("change", () => this.place());
    byId("length").addEventListener("keydown", (event) => this.key(event));
    byId("typed").addEventListener("change", () => this.typed());
    byId("previous").addEventListener("click", () => this.cliff(-1));
    byId("next").addEventListener("click", () => this.cliff(1));
    byId("choices").addEventListener("submit", (event) => event.preventDefault());
  }

  text(place) { return this.data.texts[place]; }

  // Fills each list with the choices that exist beside those before it, and keeps what was chosen where it exists.
  choose() {
    let left = this.keys;
    for (const [i, field] of FIELDS.entries()) {
      const values = [...new Set(left.map((key) => key[i]))];
      const label = field === "rows" ? (rows) => Number(rows).toLocaleString("en") : String;
      fill(byId(field), values, this.wanted[i] ?? byId(field).value, label);
      left = left.filter((key) => key[i] === byId(field).value);
    }
    this.key_ = FIELDS.map((field) => byId(field).value);
    const plans = this.data.plans[this.data.combinations[this.key_.join(" ")]];
    const { cliffs, columns } = plans[byId("alignment").value];
    this.family = { cliffs, answers: columns[COLS].map((_, i) => columns.map((column) => column[i])) };
    this.axis();
    // A length of another kind than the one that was chosen gives way to the nearest of that kind.
    this.go(this.kind(this.asked) === byId("alignment").value ? this.asked : this.nearest(this.asked));
    this.place();
  }

  kind(cols) { return cols < this.step_ || cols % this.step_ === 0 ? "aligned" : cols % 2 ? "odd" : "even"; }

  // The length that is nearest to another one, of those that have an answer.
  nearest(cols) { return this.family.answers[this.place_of(cols)][COLS]; }

  place_of(cols) {
    const away = (answer) => Math.abs(Math.log2(answer[COLS] / cols));
    return this.family.answers.reduce((best, answer, i, all) => (away(answer) < away(all[best]) ? i : best), 0);
  }

  // Shows the answer for a length; where the page has none, that of a neighbour, which it names.
  go(cols) {
    this.asked = cols;
    this.index = this.place_of(cols);
    this.cols = this.family.answers[this.index][COLS];
    byId("typed").value = cols;
    byId("length").setAttribute("aria-valuetext", `${english(cols)} elements`);
    byId("snapped").textContent = cols === this.cols ? "" : `This page has no answer for ${english(cols)}. The plan below is for `
      + `${english(this.cols)}, the nearest of its ${KINDS[this.kind(cols)](this.step_)}. The command at the end gives the answer for ${english(cols)}.`;
    this.show();
  }

  // Puts the slider on the length that is shown.
  place() { byId("length").value = Math.log2(this.asked); }

  typed() {
    const asked = Number(byId("typed").value);
    if (!Number.isSafeInteger(asked) || asked < 1) {
      this.go(this.asked);
      byId("snapped").textContent = "A row length is a whole number, at least 1.";
      return;
    }
    this.asked = asked;
    byId("alignment").value = this.kind(asked);
    this.choose();
  }

  step(by) {
    const last = this.family.answers.length - 1;
    this.go(this.family.answers[Math.max(0, Math.min(last, this.index + by))][COLS]);
    this.place();
  }

  cliff(direction) {
    const firsts = this.family.cliffs.map(([, first]) => first);
    const found = direction > 0 ? firsts.find((cols) => cols > this.cols) : firsts.findLast((cols) => cols < this.cols);
    if (found !== undefined) { this.go(found); this.place(); }
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, Home: -Infinity, End: Infinity };
    if (event.key in steps) this.step(steps[event.key]);
    else if (event.key === "PageUp" || event.key === "PageDown") this.cliff(event.key === "PageUp" ? 1 : -1);
    else return;
    event.preventDefault();
  }

  // The chart over all lengths: the band of plans, the cliffs and the estimated speed.
  axis() {
    const { answers, cliffs } = this.family;
    const gbps = (answer) => answer[BYTES] / answer[ESTIMATE] / 1e3;
    const starts = [answers[0][COLS], ...cliffs.map(([, first]) => first)];
    const pieces = starts.map((begin, i) => {
      const end = i < cliffs.length ? cliffs[i][1] : answers.at(-1)[COLS];
      const plan = this.text(answers.find((answer) => answer[COLS] === begin)[PLAN]);
      return { cols: begin, end, plan, words: `from ${begin.toLocaleString("en")}` };
    });
    const last = answers.at(-1);
    this.sets = {
      answers: answers.map((answer) => ({ cols: answer[COLS], gbps: gbps(answer), plan: this.text(answer[PLAN]) })),
      pieces,
      cliffs: cliffs.map(([before, first], i) => ({
        cols: first, words: `${pieces[i].plan} up to ${before.toLocaleString("en")}, ${pieces[i + 1].plan} from ${first.toLocaleString("en")}`,
      })),
      ceiling: [{ gbps: last[BYTES] / last[FLOOR] / 1e3 }],
    };
    const kind = KINDS[byId("alignment").value](this.step_);
    const list = pieces.map((piece) => `${piece.plan} ${piece.words}`);
    byId("cliff-list").textContent = cliffs.length
      ? `Cliffs (${kind}): ${list.join("; ")}.` : `One strategy serves all lengths (${kind}): ${pieces[0].plan}.`;
  }

  show() {
    const answer = this.family.answers[this.index], cols = answer[COLS];
    const full = (place) => this.text(place).replaceAll("{n}", cols);
    const [framework, gpu, operation, option, dtype, rows] = this.key_;
    const facts = answer[FACTS].map((fact) => fact.map((place) => this.text(place)));
    const fact = Object.fromEntries(facts);
    byId("plan").textContent = this.text(answer[PLAN]);
    const options = option === "none" ? "" : ` with ${option}`;
    byId("problem").textContent = `for ${operation} of ${rows} x ${cols} ${dtype}${options} on ${gpu}`;
    byId("reason").textContent = `Why: ${full(answer[REASON])}.`;
    byId("time").textContent = `Moves ${fact["bytes moved"].split(";")[0]}; floor ${fact.floor}; estimate ${fact.estimate}.`;
    byId("memory").textContent = fact.memory ? `${gpu} is ${fact.memory}.` : "";
    pairs(byId("facts"), facts);
    const rowsOfOthers = answer[OTHERS].map(([name, head, tail]) => {
      const line = make("tr");
      line.append(make("th", this.text(name), { scope: "row" }), make("td", full(head) + full(tail)));
      return line;
    });
    byId("others").tBodies[0].replaceChildren(...rowsOfOthers);
    byId("command").textContent = this.command(framework, gpu, operation, option, dtype, rows, this.asked);
    const firsts = this.family.cliffs.map(([, first]) => first);
    byId("previous").disabled = !firsts.some((first) => first < cols);
    byId("next").disabled = !firsts.some((first) => first > cols);
    const here = [{ cols, gbps: answer[BYTES] / answer[ESTIMATE] / 1e3 }];
    this.draw({ ...this.sets, here });
  }

  command(framework, gpu, operation, option, dtype, rows, cols) {
    const words = [`onlinesoftmax explain ${rows}x${cols} --dtype ${dtype} --device ${gpu} --op ${operation}`];
    if (framework !== "torch") words.push(`--framework ${framework}`);
    if (option !== "none") words.push(this.data.arguments[option].replace("SHAPE", `${rows}x${cols}`));
    return words.join(" ");
  }

  // Puts the slider under the axis: its thumb stands below the length on the chart.
  align() {
    const { view } = drawn.get(byId("lengths")).result;
    const scale = view.scale("x"), begin = view.origin()[0] + scale(1);
    byId("length").style.marginLeft = `${begin - THUMB / 2}px`;
    byId("length").style.width = `${scale(2 ** 30) - scale(1) + THUMB}px`;
    if (this.aligned === view) return;
    this.aligned = view;
    view.addResizeListener(() => view.runAfter(() => this.align()));
  }

  // The chart is drawn once at a time; while it is drawn, only the newest data wait.
  async draw(data) {
    const busy = this.waiting !== undefined;
    this.waiting = data;
    if (busy) return;
    let latest;
    do {
      latest = this.waiting;
      await redraw(byId("lengths"), this.specs.lengths, latest);
    } while (this.waiting !== latest);
    this.waiting = undefined;
    this.align();
  }
}

const THUMB = 16;
