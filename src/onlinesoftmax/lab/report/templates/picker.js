// The picker: looks up the planner's answers.  Nothing about plans is computed here.

const FIELDS = ["framework", "gpu", "operation", "option", "dtype", "rows"];
const [COLS, PLAN, REASON, BYTES, FLOOR, ESTIMATE, FACTS, OTHERS] = Array(8).keys();

// Rows of these kinds begin on other addresses, so a length says little about a neighbour of another kind.
const KINDS = { aligned: (step) => `multiples of ${step}, or less`, even: () => "other even lengths", odd: () => "odd lengths" };
const english = (number) => number.toLocaleString("en");

const speed = (answer) => answer[BYTES] / answer[ESTIMATE] / 1e3;

// A whole number of at least 1, or undefined.
function whole(text) {
  const number = Number(text);
  return Number.isSafeInteger(number) && number >= 1 ? number : undefined;
}

// The value that is nearest to a number by ratio.
function closest(values, number) {
  const away = (value) => Math.abs(Math.log2(value / number));
  return values.reduce((best, value) => (away(value) < away(best) ? value : best));
}

class Picker {
  constructor(data, specs, colors) {
    Object.assign(this, { data, specs, colors });
    this.keys = Object.keys(data.combinations).map((key) => key.split(" "));
    this.rows = this.keys.some((key) => key[5] === "4096") ? 4096 : Number(this.keys[0][5]);
    this.wanted = [];
    this.asked = 4096;
    this.step_ = Number(byId("alignment").dataset.step);
    fill(byId("alignment"), Object.keys(KINDS), "aligned", (kind) => KINDS[kind](this.step_));
    for (const [i, field] of FIELDS.entries()) {
      if (field !== "rows") byId(field).addEventListener("change", () => { this.wanted[i] = byId(field).value; this.choose(); });
    }
    byId("rows").addEventListener("change", () => { this.rows = whole(byId("rows").value) ?? this.rows; this.choose(); });
    byId("beside").addEventListener("change", () => this.choose());
    byId("copy").addEventListener("click", () => copy(byId("link").href, byId("copied")));
    addEventListener("hashchange", () => this.follow());
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

  // Takes the choice that the address names, as #gpu=h200&cols=4096.
  follow() {
    const named = new URLSearchParams(location.hash.slice(1));
    for (const [i, field] of FIELDS.entries()) if (field !== "rows" && named.has(field)) this.wanted[i] = named.get(field);
    this.rows = whole(named.get("rows")) ?? this.rows;
    if (named.has("beside")) byId("beside").replaceChildren(new Option(named.get("beside")));
    const cols = whole(named.get("cols"));
    if (cols) {
      this.asked = cols;
      byId("alignment").value = this.kind(cols);
    }
    this.choose();
    if (cols) byId("picker").scrollIntoView();
  }

  family_of(key) {
    const { cliffs, columns } = this.data.plans[this.data.combinations[key.join(" ")]][byId("alignment").value];
    return { gpu: key[1], cliffs, answers: columns[COLS].map((_, i) => columns.map((column) => column[i])) };
  }

  // Fills each list with the choices that exist beside those before it, and keeps what was chosen where it exists.
  choose() {
    let left = this.keys;
    for (const [i, field] of FIELDS.entries()) {
      const values = [...new Set(left.map((key) => key[i]))];
      if (field === "rows") {
        byId("planned-rows").replaceChildren(...values.map((value) => new Option(value)));
        byId("rows").value = this.rows;
        left = left.filter((key) => key[i] === closest(values, this.rows));
      } else {
        fill(byId(field), values, this.wanted[i] ?? byId(field).value);
        left = left.filter((key) => key[i] === byId(field).value);
      }
    }
    [this.key_] = left;
    const others = this.keys.filter((key) => key.every((value, i) => (value === this.key_[i]) === (i !== 1))).map((key) => key[1]);
    fill(byId("beside"), ["no other GPU", ...others], byId("beside").value);
    this.family = this.family_of(this.key_);
    this.beside = byId("beside").selectedIndex ? this.family_of(this.key_.with(1, byId("beside").value)) : null;
    this.axis();
    // A length of another kind than the one that was chosen gives way to the nearest of that kind.
    this.go(this.kind(this.asked) === byId("alignment").value ? this.asked : this.nearest(this.asked));
    this.place();
  }

  kind(cols) { return cols < this.step_ || cols % this.step_ === 0 ? "aligned" : cols % 2 ? "odd" : "even"; }

  // The length that is nearest to another one, of those that have an answer.
  nearest(cols) { return closest(this.family.answers.map((answer) => answer[COLS]), cols); }

  // Shows the answer for a length; where the page has none, that of a neighbour, which it names.
  go(cols) {
    this.asked = cols;
    this.cols = this.nearest(cols);
    this.index = this.family.answers.findIndex((answer) => answer[COLS] === this.cols);
    byId("typed").value = cols;
    byId("length").setAttribute("aria-valuetext", `${english(cols)} elements`);
    const rows = Number(this.key_[5]);
    byId("snapped").textContent = (cols === this.cols ? "" : `This page has no answer for ${english(cols)}. The plan below is for `
      + `${english(this.cols)}, the nearest of its ${KINDS[this.kind(cols)](this.step_)}. The command at the end gives the answer for ${english(cols)}. `)
      + (rows === this.rows ? "" : `This page has no answer for ${english(this.rows)} rows: the plan is for ${english(rows)}, the nearest.`);
    this.show();
  }

  // Puts the slider on the length that is shown.
  place() { byId("length").value = Math.log2(this.asked); }

  typed() {
    const asked = whole(byId("typed").value);
    if (!asked) {
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

  // The data of the chart over all lengths for a GPU: the band of plans, the cliffs and the estimated speed.
  sets_of({ gpu, answers, cliffs }) {
    const starts = [answers[0][COLS], ...cliffs.map(([, first]) => first)];
    const pieces = starts.map((cols, i) => {
      const end = i < cliffs.length ? cliffs[i][1] : answers.at(-1)[COLS];
      const plan = this.text(answers.find((answer) => answer[COLS] === cols)[PLAN]);
      return { gpu, cols, end, plan, words: `from ${english(cols)}` };
    });
    const last = answers.at(-1);
    return {
      pieces,
      answers: answers.map((answer) => ({ cols: answer[COLS], gbps: speed(answer), plan: this.text(answer[PLAN]) })),
      cliffs: cliffs.map(([before, first, why], i) => ({
        cols: first, words: `${pieces[i].plan} up to ${english(before)}, ${pieces[i + 1].plan} from ${english(first)}: ${this.text(why)}`,
      })),
      ceiling: [{ gbps: last[BYTES] / last[FLOOR] / 1e3 }],
    };
  }

  axis() {
    const own = this.sets_of(this.family), beside = this.beside ? this.sets_of(this.beside) : { pieces: [], answers: [], ceiling: [] };
    const answers = [...own.answers, ...beside.answers.map((answer) => ({ ...answer, beside: true }))];
    this.sets = { ...own, answers, ceiling: [...own.ceiling, ...beside.ceiling], pieces_beside: beside.pieces };
    this.shown = [...new Set([...own.pieces, ...beside.pieces].map((piece) => piece.plan))];
    byId("cliff-list").replaceChildren(...own.pieces.map((piece, i) => {
      const line = make("li");
      const why = i ? `, because ${this.text(this.family.cliffs[i - 1][2])}` : "";
      line.append(this.swatch(piece.plan), `${piece.plan} ${piece.words}${why}.`);
      return line;
    }));
  }

  // The dot in the colour of a strategy.
  swatch(plan) {
    const dot = make("span", "", { class: "swatch" });
    dot.style.background = this.colors[plan];
    return dot;
  }

  // Shows the answer for a GPU in the box whose elements have this prefix.
  answer(prefix, answer, gpu) {
    const [, , operation, option, dtype, rows] = this.key_;
    const full = (place) => this.text(place).replaceAll("{n}", answer[COLS]);
    const facts = answer[FACTS].map((fact) => fact.map((place) => this.text(place)));
    const fact = Object.fromEntries(facts);
    const plan = this.text(answer[PLAN]);
    byId(`${prefix}plan`).replaceChildren(this.swatch(plan), plan);
    const options = option === "none" ? "" : ` with ${option}`;
    byId(`${prefix}problem`).textContent = `for ${operation} of ${rows} x ${answer[COLS]} ${dtype}${options} on ${gpu}`;
    byId(`${prefix}reason`).textContent = `Why: ${full(answer[REASON])}.`;
    byId(`${prefix}time`).textContent = `Moves ${fact["bytes moved"].split(";")[0]}; floor ${fact.floor}; estimate ${fact.estimate}.`;
    byId(`${prefix}memory`).textContent = fact.memory ? `${gpu} is ${fact.memory}.` : "";
    return facts;
  }

  show() {
    const answer = this.family.answers[this.index], cols = answer[COLS];
    const full = (place) => this.text(place).replaceAll("{n}", cols);
    const [framework, gpu, operation, option, dtype] = this.key_;
    pairs(byId("facts"), this.answer("", answer, gpu));
    byId("beside-note").textContent = this.beside ? `The upper band and the dashed line are those of ${this.beside.gpu}.` : "";
    byId("beside-answer").hidden = !this.beside;
    if (this.beside) {
      const { answers } = this.beside, near = closest(answers.map((each) => each[COLS]), cols);
      this.answer("beside-", answers.find((each) => each[COLS] === near), this.beside.gpu);
    }
    const rowsOfOthers = answer[OTHERS].map(([name, head, tail, block, warps, registers]) => {
      const line = make("tr"), start = make("th", "", { scope: "row" });
      start.append(this.swatch(this.text(name)), this.text(name));
      const numbers = [block, warps, registers].map((place) => make("td", this.text(place), { class: "number" }));
      line.append(start, make("td", full(head) + full(tail), { class: "why" }), ...numbers);
      return line;
    });
    byId("others").tBodies[0].replaceChildren(...rowsOfOthers);
    byId("command").textContent = this.command(framework, gpu, operation, option, dtype, this.rows, this.asked);
    const choice = { framework, gpu, operation, option, dtype, rows: this.rows, cols: this.asked };
    if (this.beside) choice.beside = this.beside.gpu;
    byId("link").href = `#${new URLSearchParams(choice)}`;
    byId("copied").textContent = "";
    const firsts = this.family.cliffs.map(([, first]) => first);
    byId("previous").disabled = !firsts.some((first) => first < cols);
    byId("next").disabled = !firsts.some((first) => first > cols);
    this.draw({ ...this.sets, here: [{ cols, gbps: speed(answer) }] });
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
      await redraw(byId("lengths"), this.specs.lengths, latest, { shown: this.shown });
    } while (this.waiting !== latest);
    this.waiting = undefined;
    this.align();
  }
}

const THUMB = 16;
