// Time, collectives, boundaries, memory.
const PART_COLOURS = {compute: "#3b6fb6", communication: "#f0a830", wait: "#c7ccd4", idle: "#f3f4f6"};

function drawTime() {
  const time = data.time;
  if (!time) {
    section("Time", "time", make("p", {class: "soft"}, data.times));
    return;
  }
  const work = time.ranks.map(row => row.compute);
  const least = work.indexOf(Math.min(...work)), most = work.indexOf(Math.max(...work));
  const takes = time.steps.length > 1 ? `${time.steps.length} steps take` : "The step takes";
  const options = Object.entries(time.options).map(([key, value]) => `, ${key} ${value}`).join("");
  const uneven = work.length < 2 ? "" : ` Compute: ${amount(work[least])} ${unit} on rank ${data.ranks[least]} ` +
    `to ${amount(work[most])} ${unit} on rank ${data.ranks[most]}.`;
  const box = section("Time", "time",
    make("p", {}, `${takes} ${amount(totalSeconds)} ${unit}, ${data.times}${options}.${uneven}`),
    make("p", {class: "soft"}, `Kernel times are ${sharesText(time.sources)}; the time goes to ${sharesText(time.bounds)}.`));
  box.append(make("h3", {}, `Where each rank's time goes (${unit})`), partLegend(), rankTable(time));
  box.append(make("h3", {}, `By module and rank (${unit}, all layers)`), moduleTable(time));
}

function sharesText(shares) {
  return Object.entries(shares).map(([name, share]) => `${percent(share)} ${name}`).join(", ");
}

function partLegend() {
  return make("div", {class: "legend"}, ...Object.entries(PART_COLOURS).map(([name, background]) =>
    make("span", {}, make("i", {style: {background}}), name)));
}

function rankTable(time) {
  const names = Object.keys(PART_COLOURS);
  const columns = [["rank", "number"], ...names.map(name => [name, "number"]), ["", ""]];
  const found = makeTable(columns, time.ranks.map((row, rank) =>
    [data.ranks[rank], ...names.map(name => amount(row[name])), ""]), "rank-times");
  found.querySelectorAll("tbody tr").forEach((tr, rank) => {
    const bar = make("div", {class: "bar"}, ...names.map(name =>
      make("div", {style: {width: `${100 * time.ranks[rank][name] / totalSeconds}%`, background: PART_COLOURS[name]}})));
    tr.lastChild.append(bar);
    tr.lastChild.style.width = "100%";
  });
  return found;
}

function moduleTable(time) {
  const most = Math.max(...time.modules.flatMap(row => row.seconds));
  const columns = [["module", "code"], ["stream"], ["share", "number"],
    ...data.ranks.map((rank, i) => [i ? rank : `rank ${rank}`, "number"])];
  const colours = {compute: "59, 111, 182", comm: "240, 168, 48"};
  const rows = time.modules.map(({module, stream, seconds}) => [
    module.replace(/^model\.layers\.\*\./, ""), stream, percent(Math.max(...seconds) / totalSeconds),
    ...seconds.map(value => ({text: amount(value), style: {background: `rgba(${colours[stream]}, ${(0.6 * value / most).toFixed(3)})`}})),
  ]);
  return makeTable(columns, rows, "module-times");
}

function drawCollectives() {
  const timed = data.collectives.some(row => row.seconds);
  const columns = [["group"], ["op"], ["module", "code"], ["shape", "code"], ["calls", "number"], ["MiB sent", "number"]];
  if (timed) columns.push([unit, "number"], [`${unit} waiting`, "number"]);
  const rows = data.collectives.map(row => {
    const dim = row.dim > 0 ? ` dim ${row.dim}` : "";
    const shape = `${shapeText(row.input)} \u2192 ${shapeText(row.output)}`;
    const found = [row.group, row.op + dim, row.module, shape, row.count, (row.bytes / 2 ** 20).toFixed(2)];
    return timed ? [...found, rangeText(row.seconds, amount), rangeText(row.wait, amount)] : found;
  });
  section("Collectives", "collectives",
    make("p", {class: "soft"}, "All layers and steps. Calls and MiB are those of rank 0" +
      (timed ? "; times are sums over calls, from the rank with the least to the one with the most." : ".")),
    rows.length ? makeTable(columns, rows, "collective-table") : make("p", {}, "No rank talks to another."));
}

function drawBoundaries() {
  const box = section("Boundaries", "boundaries",
    make("p", {class: "soft"}, "What crosses the edges of modules, as rank 0 holds it, in the first layer of each kind. Replicated values are left out."));
  const failing = data.boundaries.findIndex(part => part.rows.some(row => !row.ok));
  const layered = data.boundaries.map((part, i) => part.layers.length ? i : -1);
  const open = failing >= 0 ? failing : Math.max(...layered);
  data.boundaries.forEach((part, i) => {
    if (!part.rows.length) return;
    const several = data.steps.length > 1 ? `step ${part.step}, ` : "";
    const name = several + (part.layers.length ? layersText(part.layers) : "outside layers");
    const bad = part.rows.filter(row => !row.ok).length;
    const details = make("details", {open: i === open},
      make("summary", {}, `${name}: ${part.rows.length} boundaries${bad ? `, ${bad} broken` : ""}`));
    const rows = part.rows.map(row => [
      {text: row.module.replace(/^model\.layers\.\d+\./, ""), class: row.ok ? "" : "bad"},
      row.port, row.layout, shapeText(row.shape), row.others,
      {text: row.ok ? "ok" : "FAIL", class: row.ok ? "good" : "bad"},
    ]);
    const columns = [["module", "code"], ["port"], ["layout"], ["shape", "code"], ["other ranks"], ["check"]];
    if (data.verdict === "unfinished") {
      columns.pop();
      rows.forEach(row => row.pop());
    }
    details.append(makeTable(columns, rows));
    box.append(details);
  });
}

function drawMemory() {
  if (data.memory.length) {
    const bytes = (name, value) => /bytes/.test(name) && typeof value === "number" ? `${(value / 2 ** 30).toFixed(3)} GiB` : value;
    section("Memory", "memory", makeTable([["", "code"], ["", "number"]],
      data.memory.map(([name, value]) => [name, bytes(name, value)]), "memory-table"));
  }
  const {wall_s, peak_rss_mb} = data.resources;
  if (wall_s) {
    const used = peak_rss_mb ? `, ${peak_rss_mb.total} MiB for the whole process tree` : "";
    document.querySelector("main").append(make("p", {class: "soft"}, `The emulation itself took ${wall_s} s${used}.`));
  }
}
