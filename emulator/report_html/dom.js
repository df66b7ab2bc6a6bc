// Small helpers that build elements; all text goes in as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);

function make(tag, options, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(options || {})) {
    if (key === "class") element.className = value;
    else if (key === "style") Object.assign(element.style, value);
    else element[key] = value;
  }
  for (const child of children) element.append(child);
  return element;
}

// columns: [title, class]; rows: lists of text or {text, class, style, title}
function makeTable(columns, rows, id) {
  const head = make("tr", {}, ...columns.map(([title, kind]) => make("th", {class: kind || ""}, title)));
  const body = rows.map(row => make("tr", {}, ...row.map((cell, i) => {
    const given = cell !== null && typeof cell === "object" ? cell : {text: cell};
    const kind = [columns[i][1] || "", given.class || ""].join(" ").trim();
    const td = make("td", {class: kind, style: given.style}, String(given.text ?? ""));
    if (given.title) td.title = given.title;
    return td;
  })));
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
  if (id) table.id = id;
  return make("div", {class: "scroll"}, table);
}

function section(title, id, ...children) {
  const found = make("section", {id}, make("h2", {}, title), ...children);
  document.querySelector("main").append(found);
  return found;
}

function shapeText(shape) {
  return "[" + shape.map(d => d === null ? "*" : d).join(", ") + "]";
}

// The page's unit of time: microseconds where the whole run takes less than 10 ms.
const totalSeconds = data.time ? data.time.steps.reduce((a, b) => a + b, 0) : 0;
const [unit, perSecond] = totalSeconds < 0.01 ? ["\u00b5s", 1e6] : ["ms", 1e3];

function amount(seconds) {
  const value = seconds * perSecond;
  if (value < 1e-6) return "0"; // a rest of rounding
  return value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2);
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0.995 || share < 0.095 ? 1 : 0)} %`.replace(/\.0 %/, " %");
}

function rangeText([low, high], format) {
  return format(low) === format(high) ? format(low) : format(low) + " to " + format(high);
}

function layersText(layers) {
  const runs = [];
  for (const layer of layers) {
    const last = runs[runs.length - 1];
    if (last && layer === last[1] + 1) last[1] = layer;
    else runs.push([layer, layer]);
  }
  const text = runs.map(([a, b]) => a === b ? `${a}` : `${a} to ${b}`).join(", ");
  return layers.length === 1 ? `layer ${text}` : `layers ${text} (${layers.length}, all alike)`;
}
