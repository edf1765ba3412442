"use strict";
// Draws LEVELS: one object for each level of the run, made by bench/page.py.

const COLORS = ["#2563eb", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#c92a2a", "#5f3dc4", "#846358"];
const QUIET = "#8a94a0";
const LEAST_MS = 0.01; // a logarithmic axis has no zero

function number(value) {
  if (value == null) return "–";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

function axis(label) {
  return {
    label, labelSize: 22, labelFont: "12px system-ui, sans-serif", font: "11px system-ui, sans-serif",
    stroke: QUIET, grid: { stroke: "#eef1f4", width: 1 }, ticks: { stroke: "#eef1f4" },
    values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : number(tick))),
  };
}

function line(label, color, more = {}) {
  return { label, stroke: color, width: 1.6, points: { show: false }, value: (_, v) => number(v), ...more };
}

// Round numbers on a logarithmic axis: evenly spaced ones within a decade, else 1, 2 and 5 of each, else 1.
function rounded(drawn, which, low, high) {
  const found = [];
  if (high / low < 10) {
    const rough = (high - low) / 5;
    const decade = 10 ** Math.floor(Math.log10(rough));
    const step = decade * [1, 2, 5, 10].find((factor) => factor * decade >= rough);
    for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
    return found;
  }
  for (let decade = 10 ** Math.floor(Math.log10(low)); decade <= high; decade *= 10)
    for (const factor of high / low < 1000 ? [1, 2, 5] : [1])
      if (factor * decade >= low && factor * decade <= high) found.push(factor * decade);
  return found;
}

// One plot of `data` into the element `id`. x: { label, log, names }, y: { label, range }.
function plot(id, title, x, y, series, data) {
  const box = document.createElement("div");
  box.className = "plot";
  document.getElementById(id).append(box);
  const width = () => box.clientWidth - 16;
  const drawn = new uPlot({
    title, width: width(), height: 260, series: [{ label: x.label, value: (_, v) => number(v) }, ...series],
    scales: { x: { time: false, ...across(x) }, y: { range: y.range ?? ((_, low, high) => [0, high * 1.08 || 1]) } },
    axes: [{ ...axis(x.label), ...ticks(x) }, { ...axis(y.label), size: 62 }],
    cursor: { points: { size: 6 } },
  }, data, box);
  addEventListener("resize", () => drawn.setSize({ width: width(), height: 260 }));
}

function across({ log, names }) {
  if (names) return { range: [0.7, names.length + 0.3] };
  return log ? { distr: 3, range: (_, low, high) => [low / 1.05, high * 1.05] } : {};
}

function ticks({ log, names }) {
  if (!names) return log ? { splits: rounded, filter: (_, found) => found } : {};
  return { splits: names.map((_, i) => i + 1), values: () => names };
}

function distribution(name, title) {
  const tables = LEVELS.map((level) => level.distributions[name]).filter((table) => table[0].length);
  if (!tables.length) return;
  const loads = LEVELS.filter((level) => level.distributions[name][0].length).map((level) => level.load);
  const shown = tables.map(([values, shares]) => {
    const least = new Map(values.map((value, i) => [Math.max(value, LEAST_MS), shares[i]]));
    return [[...least.keys()], [...least.values()]];
  });
  plot("distributions", title, { label: "ms", log: true }, { label: "% at most so slow", range: [0, 100] },
    loads.map((load, i) => line(load, COLORS[i % COLORS.length], { spanGaps: true })), uPlot.join(shown));
}

function overLoads() {
  const at = LEVELS.map((_, i) => i + 1);
  const dots = { points: { show: true, size: 7 } };
  const of = (name) => LEVELS.map((level) => level[name]);
  const by = (title, label, series, data) => {
    plot("loads", title, { label: "level", names: of("load") }, { label }, series, [at, ...data]);
  };
  by("Throughput", "tokens/s out", [line("tokens/s", COLORS[0], dots)], [of("tokens_per_s")]);
  by("Time to the first token", "ms", [line("p50", COLORS[0], dots), line("p99", COLORS[1], dots)],
    [of("ttft_p50_ms"), of("ttft_p99_ms")]);
}

function overTime(level, id) {
  const time = { label: "seconds" };
  const { series, points } = level;
  plot(id, "Time to the first token, each request", time, { label: "ms" },
    [{ label: "TTFT", stroke: COLORS[0], paths: () => null, value: (_, v) => number(v),
       points: { show: true, size: 5, fill: COLORS[0] + "99", stroke: "transparent", space: 0 } }],
    [points.at, points.ttft_ms]);
  plot(id, "Between tokens", time, { label: "ITL, ms" },
    [line("p50", COLORS[0]), line("p99", COLORS[1])], [series.at, series.itl_p50_ms, series.itl_p99_ms]);
  plot(id, "Throughput", time, { label: "tokens/s out" },
    [line("tokens/s", COLORS[2], { fill: COLORS[2] + "1a" })], [series.at, series.tokens_per_s]);
  plot(id, "Open requests, and failed ones", time, { label: "requests" },
    [line("open", COLORS[4]), line("failed before any text", COLORS[1]), line("broken in the answer", COLORS[5])],
    [series.at, series.open, series.refused, series.broken]);
}

if (LEVELS.length > 1) overLoads();
distribution("ttft", "Time to the first token (TTFT)");
distribution("itl", "Between tokens (ITL)");
distribution("tpot", "Time per token (TPOT)");
distribution("e2e", "Whole answer (E2E)");
LEVELS.forEach((level, i) => overTime(level, `level-${i}`));
