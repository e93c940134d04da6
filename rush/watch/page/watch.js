"use strict";
// The live page. Once a second it asks for what it does not have yet: the list where it changed, and new points of the
// chosen runs. Everything that comes from a file is put into the page as text, never as HTML.
(() => {
  const POLL_MS = 1000, HIDDEN_MS = 10000, RETRY_MS = 3000, MOST_CHOSEN = 12, COLORS = 6;
  const KINDS = [["run", "Runs"], ["ladder", "Ladders"], ["tune", "Searches"], ["scale", "Scaling studies"], ["race", "Races"]];
  const FIGURES = [
    { key: "loss", title: "Loss", large: true, free: true, format: (v) => v.toPrecision(5) },
    { key: "tokens_per_s", title: "Tokens per second", format: short },
    { key: "trained_per_s", title: "Trained tokens per second", format: short },
    { key: "mfu", title: "MFU", format: percent },
    { key: "ceiling_fraction", title: "Of the measured ceiling", format: percent },
    { key: "memory_bytes", title: "Memory", format: size, binary: true },
    { key: "lr", title: "Learning rate", format: short },
    { key: "grad_norm", title: "Gradient norm", format: short },
    { key: "accuracy", title: "Preference accuracy", format: percent },
    { key: "padding", title: "Padding", format: percent },
    { key: "epoch", title: "Passes over the data", format: short },
  ];
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  let version = "", rows = [], chosen = [], first = true;
  const runs = new Map(); // id -> its curves, samples, and how much of them there is
  const charts = new Map(); // figure -> its elements

  // ---- numbers as words

  function short(value) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    for (const [unit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= unit * 0.9995) return trimmed((value / unit).toPrecision(3)) + sign;
    }
    return size >= 1e-3 ? trimmed(value.toPrecision(3)) : value.toExponential(1).replace("e-0", "e-");
  }
  function trimmed(text) { return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text; }
  function percent(value) { return `${trimmed((100 * value).toPrecision(3))} %`; }
  function binaryUnit(value) { return 2 ** (10 * Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(value, 1)) / 10)))); }
  function size(value) {
    const unit = binaryUnit(value), amount = value / unit;
    if (amount >= 1023.5 && unit < 2 ** 40) return size(unit * 1024); // rounded it is one of the next unit
    return `${amount >= 999.5 ? Math.round(amount) : trimmed(amount.toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][Math.log2(unit) / 10]}`;
  }
  function place(value, axis) {
    if (axis !== "time") return axis === "steps" && value < 1e6 ? String(Math.round(value)) : short(value);
    if (value < 120) return `${trimmed(value.toPrecision(3))} s`;
    if (value < 7200) return `${trimmed((value / 60).toPrecision(3))} min`;
    return `${trimmed((value / 3600).toPrecision(3))} h`;
  }

  // ---- asking

  async function poll() {
    const query = new URLSearchParams({ have: version });
    for (const id of chosen.filter(isRun)) {
      query.append("run", id);
      query.append("seen", runs.get(id)?.seen || "-");
    }
    for (const id of chosen.filter((one) => !isRun(one))) query.append("table", id);
    let wait = document.hidden ? HIDDEN_MS : POLL_MS;
    try {
      const answer = await fetch(`api/live?${query}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(`${answer.status}`);
      take(await answer.json());
      connection(`Live · ${new Date().toLocaleTimeString()}`, false);
    } catch {
      connection("No answer from rush watch. Is it still running? Trying again …", true);
      wait = RETRY_MS;
    }
    window.setTimeout(poll, wait);
  }
  function connection(words, lost) {
    byId("connection").textContent = words;
    byId("connection").classList.toggle("lost", lost);
  }

  function take(answer) {
    version = answer.version;
    let redraw = false;
    if (answer.list) {
      rows = answer.list;
      choose();
      drawList();
      drawTables();
      redraw = true;
    }
    for (const [id, part] of Object.entries(answer.runs)) redraw = join(id, part) || redraw;
    if (redraw) draw();
  }

  const FRESH = () => ({ at: { steps: [], tokens: [], time: [] }, figures: {}, samples: [],
                         validations: { steps: [], tokens: [], time: [], loss: [] } });
  // What came, put behind what is there; the last point may have grown, so it comes again.
  function join(id, part) {
    let run = runs.get(id);
    if (!run || part.anew) runs.set(id, run = { ...FRESH(), samples: run && !part.samples ? run.samples : [] });
    run.seen = part.seen;
    if (part.at) {
      const old = run.at.steps.length;
      for (const axis of Object.keys(run.at)) run.at[axis].splice(part.from, Infinity, ...part.at[axis]);
      const now = run.at.steps.length;
      for (const key of new Set([...Object.keys(run.figures), ...Object.keys(part.figures)])) {
        const figure = run.figures[key] ||= { mean: new Array(old).fill(null) };
        const came = part.figures[key];
        for (const name of new Set([...Object.keys(figure), ...Object.keys(came || {})])) {
          figure[name] ||= figure.mean.slice();
          const values = came ? came[name] || came.mean : new Array(now - part.from).fill(null);
          figure[name].splice(part.from, Infinity, ...values);
        }
      }
    }
    if (part.validations) {
      for (const name of Object.keys(run.validations)) {
        run.validations[name].splice(part.validations_from, Infinity, ...part.validations[name]);
      }
    }
    if (part.samples) run.samples = [...run.samples, ...part.samples].slice(-20);
    return Boolean(part.at || part.validations || part.samples);
  }

  // ---- the list

  const row = (id) => rows.find((one) => one.id === id);
  const isRun = (id) => row(id)?.kind === "run";
  const color = (id) => chosen.filter(isRun).indexOf(id) % COLORS + 1;

  // At the first answer: what the address names, else what is running, else the newest.
  function choose() {
    if (first && rows.length) {
      first = false;
      const named = decodeURIComponent(location.hash.slice(1)).split("|").filter((id) => row(id));
      const running = rows.filter((one) => one.kind === "run" && one.status === "running").slice(0, 4);
      const newest = rows.find((one) => one.kind === "run") || rows[0];
      chosen = named.length ? named : (running.length ? running : [newest]).map((one) => one.id);
      if (!chosen.every(isRun)) version = ""; // once more, with the tables
    }
    chosen = chosen.filter((id) => row(id));
  }
  function toggle(id, on) {
    chosen = chosen.filter((one) => one !== id);
    if (on) chosen.push(id);
    if (chosen.length > MOST_CHOSEN) runs.delete(chosen.shift());
    if (!on) runs.delete(id);
    version = ""; // the list with the tables of what is chosen now
    history.replaceState(null, "", `#${encodeURIComponent(chosen.join("|"))}`);
    drawList();
    drawTables();
    draw();
  }

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") made.className = value;
      else if (key in made && key !== "for") made[key] = value;
      else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }
  function facts(one) {
    if (one.kind !== "run") return one.what || "";
    const parts = [`step ${one.step ?? 0}${one.steps ? ` of ${one.steps}` : ""}`];
    if (one.val_loss != null) parts.push(`validation ${one.val_loss.toFixed(4)}`);
    else if (one.loss != null) parts.push(`loss ${one.loss.toFixed(4)}`);
    if (one.status === "running" && one.tokens_per_s) parts.push(`${short(one.tokens_per_s)} tok/s`);
    return parts.join(" · ");
  }

  // Items are kept by id, so that focus and scrolling stay where they are.
  const items = new Map();
  function item(one) {
    let made = items.get(one.id);
    if (!made) {
      const box = element("input", { type: "checkbox" });
      const name = element("span", { class: "name" }), state = element("span"), tail = element("span", { class: "facts" });
      box.addEventListener("change", () => toggle(one.id, box.checked));
      const label = element("label", { class: "item" }, box, element("span", {}, name, state), tail);
      items.set(one.id, made = { li: element("li", {}, label), box, name, state, tail });
    }
    made.box.checked = chosen.includes(one.id);
    made.name.textContent = one.name;
    made.state.className = `state ${one.status}`;
    made.state.textContent = one.status;
    made.tail.textContent = facts(one);
    return made.li;
  }
  const groups = new Map();
  function drawList() {
    const wanted = byId("filter").value.toLowerCase();
    byId("count").textContent = rows.length;
    for (const [kind, title] of KINDS) {
      if (!groups.has(kind)) {
        const list = element("ul"), head = element("h3", { textContent: title });
        groups.set(kind, { head, list });
        byId("list").append(head, list);
      }
      const { head, list } = groups.get(kind);
      const shown = rows.filter((one) => one.kind === kind && one.name.toLowerCase().includes(wanted)).map(item);
      head.hidden = shown.length === 0;
      if (shown.length !== list.children.length || shown.some((li, at) => list.children[at] !== li)) {
        list.replaceChildren(...shown);
      }
    }
    for (const id of items.keys()) if (!row(id)) items.delete(id);
  }

  // ---- charts

  function svg(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function ticks(low, high, about) {
    const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= raw * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step);
    return found;
  }
  // A centered moving mean over about a fiftieth of the points.
  function smooth(values) {
    const reach = Math.max(1, Math.round(values.length / 100));
    const sums = [0], counts = [0];
    values.forEach((v, at) => { sums.push(sums[at] + (v ?? 0)); counts.push(counts[at] + (v === null ? 0 : 1)); });
    return values.map((v, at) => {
      const from = Math.max(0, at - reach), to = Math.min(values.length, at + reach + 1);
      return v === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
    });
  }

  const axis = () => document.querySelector("input[name=axis]:checked").value;
  function curves(figure) {
    const found = [];
    for (const id of chosen.filter(isRun)) {
      const run = runs.get(id), values = run?.figures[figure.key];
      if (!values) continue;
      const x = run.at[axis()], loss = figure.key === "loss";
      found.push({ id, x, low: values.low || values.mean, high: values.high || values.mean,
                   line: loss ? smooth(values.mean) : values.mean, raw: loss ? byId("raw").checked : Boolean(values.low),
                   checks: loss ? { x: run.validations[axis()], y: run.validations.loss } : { x: [], y: [] } });
    }
    return found;
  }
  function range(lines, figure) {
    let low = Infinity, high = -Infinity, x0 = Infinity, x1 = -Infinity;
    const add = (v) => { if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); } };
    for (const one of lines) {
      one.line.forEach(add);
      one.checks.y.forEach(add);
      if (one.raw) { one.low.forEach(add); one.high.forEach(add); }
      for (const v of [one.x[0], one.x.at(-1)]) { x0 = Math.min(x0, v); x1 = Math.max(x1, v); }
    }
    if (!figure.free && low >= 0) low = 0;
    const air = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
    return { low: low === 0 ? 0 : low - air, high: high + air, x0, x1: x1 > x0 ? x1 : x0 + 1 };
  }

  function draw() {
    const any = chosen.some(isRun);
    byId("controls").hidden = !any;
    byId("empty").hidden = chosen.length > 0;
    drawLegend();
    for (const figure of FIGURES) {
      const lines = curves(figure);
      let chart = charts.get(figure.key);
      if (!lines.length) { if (chart) chart.box.hidden = true; continue; }
      if (!chart) charts.set(figure.key, chart = makeChart(figure));
      chart.box.hidden = false;
      drawChart(chart, figure, lines);
    }
    drawSamples();
  }
  function makeChart(figure) {
    const readout = element("span", { class: "readout" }), picture = svg("svg", { tabindex: "0", role: "img" });
    const head = element("figcaption", {}, element("strong", { textContent: figure.title }), readout);
    const box = element("figure", { class: figure.large ? "chart large" : "chart" }, head);
    box.append(picture);
    const before = FIGURES.slice(FIGURES.indexOf(figure) + 1).map((one) => charts.get(one.key)?.box).find(Boolean);
    byId("charts").insertBefore(box, before || null);
    const chart = { box, picture, readout, at: null };
    picture.addEventListener("pointermove", (event) => {
      const edge = picture.getBoundingClientRect();
      chart.at = chart.inverse?.(event.clientX - edge.left) ?? null;
      point(chart, figure);
    });
    picture.addEventListener("pointerleave", () => { chart.at = null; point(chart, figure); });
    picture.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -0.02, ArrowRight: 0.02, Home: -1, End: 1 }[event.key];
      if (event.key === "Escape") chart.at = null;
      else if (move && chart.scale) {
        const { x0, x1 } = chart.scale;
        chart.at = Math.min(x1, Math.max(x0, (chart.at ?? (move > 0 ? x0 : x1)) + move * (x1 - x0)));
      } else return;
      event.preventDefault();
      point(chart, figure);
    });
    picture.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
    picture.addEventListener("blur", () => { readout.removeAttribute("aria-live"); chart.at = null; point(chart, figure); });
    new ResizeObserver(() => { if (chart.width !== picture.clientWidth) draw(); }).observe(picture);
    return chart;
  }

  function drawChart(chart, figure, lines) {
    const width = chart.width = Math.max(220, chart.picture.clientWidth);
    const height = figure.large ? Math.min(400, Math.max(240, width * 0.4)) : 190;
    const log = figure.key === "loss" && byId("log").checked;
    const scale = chart.scale = range(lines, figure);
    if (log) { const lowest = positive(lines); scale.low = lowest * 0.95; scale.high = Math.max(scale.high, lowest * 1.1); }
    const form = (v) => (log ? Math.log(Math.max(v, scale.low)) : v);
    const step = figure.binary ? binaryUnit(scale.high) : 1;
    const marks = log ? logTicks(scale.low, scale.high)
      : ticks(scale.low / step, scale.high / step, figure.large ? 6 : 4).map((v) => v * step);
    const label = figure.key === "loss" ? short : figure.format;
    const left = 14 + 7 * Math.max(...marks.map((v) => label(v).length)), right = width - 12, top = 8, bottom = height - 24;
    const x = (v) => left + (v - scale.x0) / (scale.x1 - scale.x0) * (right - left);
    const y = (v) => bottom - (form(v) - form(scale.low)) / (form(scale.high) - form(scale.low)) * (bottom - top);
    const parts = [];
    for (const v of marks) {
      parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y(v), y2: y(v) }));
      parts.push(svg("text", { class: "tick", x: left - 6, y: y(v) + 4, "text-anchor": "end" }, label(v)));
    }
    parts.push(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    const unit = axis() === "time" ? (scale.x1 >= 7200 ? 3600 : scale.x1 >= 120 ? 60 : 1) : 1;
    for (const v of ticks(scale.x0 / unit, scale.x1 / unit, width / 110).map((k) => k * unit)) {
      parts.push(svg("text", { class: "tick", x: x(v), y: bottom + 17, "text-anchor": "middle" }, place(v, axis())));
    }
    for (const one of lines) {
      const series = `series-${color(one.id)}`;
      if (one.raw) parts.push(svg("path", { class: `curve faint ${series}`, d: band(one, x, y) }));
      parts.push(svg("path", { class: `curve ${series}`, d: trace(one.x, one.line, x, y) }));
      one.checks.x.forEach((v, at) => {
        parts.push(svg("circle", { class: `dot ${series}`, cx: x(v), cy: y(one.checks.y[at]), r: 4 }));
      });
    }
    chart.cursor = svg("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    parts.push(chart.cursor);
    Object.assign(chart, { lines, x, inverse: (px) => scale.x0 + (px - left) / (right - left) * (scale.x1 - scale.x0) });
    chart.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.picture.setAttribute("height", height);
    chart.picture.setAttribute("aria-label", `${figure.title} over ${axis()}: ${spoken(chart, figure)}`);
    chart.picture.replaceChildren(...parts);
    point(chart, figure);
  }
  function positive(lines) {
    let lowest = Infinity;
    for (const one of lines) for (const v of [...one.line, ...one.low, ...one.checks.y]) if (v > 0) lowest = Math.min(lowest, v);
    return Number.isFinite(lowest) ? lowest : 1;
  }
  function logTicks(low, high) {
    const found = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k += 1) {
      for (const m of [1, 2, 3, 5, 7]) if (m * 10 ** k >= low && m * 10 ** k <= high) found.push(m * 10 ** k);
    }
    return found.length ? found : [low, high];
  }
  function trace(xs, ys, x, y) {
    let text = "", down = false;
    ys.forEach((v, at) => {
      if (v !== null) text += `${down ? "L" : "M"}${x(xs[at]).toFixed(1)} ${y(v).toFixed(1)}`;
      down = v !== null;
    });
    return text || "M0 0";
  }
  // The smallest and the largest value of each point: no spike is lost.
  function band(one, x, y) {
    let text = "", down = false;
    one.x.forEach((v, at) => {
      const [low, high] = [one.low[at], one.high[at]];
      if (low !== null) {
        text += `${down ? "L" : "M"}${x(v).toFixed(1)} ${y(low).toFixed(1)}`;
        if (high !== low) text += `L${x(v).toFixed(1)} ${y(high).toFixed(1)}`;
      }
      down = low !== null;
    });
    return text || "M0 0";
  }
  // The value of every line near a place; without one, its last value.
  function values(chart, at) {
    return chart.lines.map((one) => {
      let near = one.x.length - 1;
      if (at !== null) one.x.forEach((v, k) => { if (Math.abs(v - at) < Math.abs(one.x[near] - at)) near = k; });
      return { id: one.id, value: one.line[near] };
    }).filter((found) => found.value !== null);
  }
  function spoken(chart, figure) {
    return values(chart, null).map(({ id, value }) => `${row(id)?.name} ${figure.format(value)}`).join(", ");
  }
  function point(chart, figure) {
    const shown = chart.at !== null;
    chart.cursor?.setAttribute("visibility", shown ? "visible" : "hidden");
    if (!chart.lines) return;
    if (shown) for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, chart.x(chart.at));
    const where = shown ? [`${place(chart.at, axis())}${axis() === "time" ? "" : ` ${axis()}`}`] : [];
    chart.readout.replaceChildren(...where, ...values(chart, chart.at).map(({ id, value }) => element("span", { title: row(id)?.name ?? "" },
      element("span", { class: `line series-${color(id)}`, "aria-hidden": "true" }), figure.format(value))));
  }

  // ---- legend, samples, tables

  function drawLegend() {
    byId("legend").replaceChildren(...chosen.filter(isRun).map((id) => {
      const one = row(id), link = element("a", { href: `page?id=${encodeURIComponent(id)}`, target: "_blank", rel: "noopener" }, "page");
      const line = element("span", { class: `line series-${color(id)}`, "aria-hidden": "true" });
      return element("li", {}, line, element("span", { class: "name" }, one.name),
        element("span", { class: `state ${one.status}` }, one.status), link);
    }));
  }
  let told = "";
  function drawSamples() {
    const has = chosen.filter((id) => isRun(id) && runs.get(id)?.samples.length);
    byId("samples").hidden = has.length === 0;
    const now = has.map((id) => `${id} ${runs.get(id).seen.split(".").at(-1)}`).join("|");
    if (now === told) return; // nothing new: what is being read stays where it is
    told = now;
    byId("sample-list").replaceChildren(...has.flatMap((id) => runs.get(id).samples.slice(-3).reverse().map((sample) => element(
      "div", { class: "sample-text" },
      element("h3", {}, `${row(id).name}, step ${sample.step}${sample.why ? ` (${sample.why})` : ""}`),
      element("pre", { tabIndex: 0 }, sample.text ?? "no text"),
    ))));
  }
  function drawTables() {
    byId("tables").replaceChildren(...chosen.filter((id) => row(id)?.table).map((id) => {
      const one = row(id), { columns, rows: lines } = one.table;
      const cells = (line) => [line[0] ?? "", line[1] === null ? "–" : short(line[1]), line[2] === null ? "" : `×${line[2].toPrecision(3)}`,
        line[3] === null ? "" : size(line[3]), line[4] ?? ""];
      const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
      const cell = (text, at) => (at ? element("td", { class: at === 4 ? "prose" : "", "data-label": columns[at] }, text) : element("th", { scope: "row" }, text));
      const body = lines.map((line) => element("tr", {}, ...cells(line).map(cell)));
      const table = element("table", { class: "stackable" }, element("thead", {}, head), element("tbody", {}, ...body));
      const link = element("a", { href: `page?id=${encodeURIComponent(id)}`, target: "_blank", rel: "noopener" }, "its page");
      return element("section", { class: "record" },
        element("h2", {}, element("span", { class: "name" }, one.name), element("span", { class: `state ${one.status}` }, one.status)),
        element("p", { class: "fine" }, `${one.what}${one.finished ? "" : " so far"} · `, link),
        element("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": one.name }, table));
    }));
  }

  for (const input of document.querySelectorAll("#controls input")) input.addEventListener("change", draw);
  byId("filter").addEventListener("input", drawList);
  if (window.matchMedia("(max-width: 880px)").matches) byId("folders").open = false;
  byId("empty").hidden = false;
  poll();
})();
