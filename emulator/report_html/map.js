// The layout map: one canvas per kind of layer, ops along x, ranks along y.
const STATE_COLOURS = ["#3b6fb6", "#7fc8a9", "#f0a830", "#a98bc9", "#b08968", "#d3d7dd", "#ffffff"];
const RED = "#d62828";
const SOME_RANK = 1, THIS_RANK = 2;
const WIDTH = 18;
const LEFT = 30;

function cellHeight() {
  return data.ranks.length <= 16 ? 16 : data.ranks.length <= 64 ? 8 : 4;
}

function kindTitle(kind) {
  if (kind.layers.length) return layersText(kind.layers);
  const first = data.words[kind.columns[0][1]], last = data.words[kind.columns[kind.columns.length - 1][1]];
  return first === last ? first : `${first} \u2026 ${last}`;
}

function shortModule(module) {
  return module.replace(/^(self_attn|mlp)\./, "");
}

function labelOf([op, module]) {
  return data.words[op] + " \u00b7 " + shortModule(data.words[module]);
}

const LABEL_FONT = "11px system-ui, 'DejaVu Sans', sans-serif";

function labelHeight(kind) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = "bold " + LABEL_FONT;
  return Math.ceil(Math.max(...kind.columns.map(c => context.measureText(labelOf(c)).width))) + 10;
}

function drawKind(kind) {
  const top = labelHeight(kind), height = cellHeight(), columns = kind.columns.length, ranks = kind.cells.length;
  const wide = LEFT + columns * WIDTH + 2, high = top + ranks * height + 2;
  const scale = Math.max(1, window.devicePixelRatio || 1);
  const canvas = make("canvas", {width: wide * scale, height: high * scale});
  canvas.style.width = wide + "px";
  canvas.style.height = high + "px";
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  drawLabels(context, kind, top, height, ranks);
  kind.cells.forEach((row, rank) => row.forEach((cell, column) => {
    drawCell(context, LEFT + column * WIDTH, top + rank * height, height, cell);
  }));
  kind.columns.forEach(([, , collective], column) => {
    if (!collective) return;
    context.strokeStyle = "#1f2933";
    context.lineWidth = 1.5;
    context.strokeRect(LEFT + column * WIDTH + 0.5, top - 0.5, WIDTH - 1, ranks * height + 1);
  });
  canvas.addEventListener("mousemove", event => showCell(event, kind, top, height));
  canvas.addEventListener("mouseleave", () => { document.getElementById("tip").hidden = true; });
  return canvas;
}

function drawLabels(context, kind, top, height, ranks) {
  context.fillStyle = "#1f2933";
  context.textBaseline = "middle";
  kind.columns.forEach((column, i) => {
    context.save();
    context.translate(LEFT + (i + 0.5) * WIDTH, top - 5);
    context.rotate(-Math.PI / 2);
    context.font = (column[2] ? "bold " : "") + LABEL_FONT;
    context.fillText(labelOf(column), 0, 0);
    context.restore();
  });
  context.font = LABEL_FONT;
  context.fillStyle = "#5f6b7a";
  context.textAlign = "right";
  const every = Math.ceil(12 / height);
  for (let rank = 0; rank < ranks; rank += every) {
    context.fillText(data.ranks[rank], LEFT - 5, top + rank * height + height / 2);
  }
  context.textAlign = "left";
}

function drawCell(context, x, y, height, [state, , , mark]) {
  const gap = height > 6 ? 1 : 0;
  context.fillStyle = mark === THIS_RANK ? RED : STATE_COLOURS[state];
  context.fillRect(x + 1, y + gap, WIDTH - 2, height - 2 * gap);
  if (state === data.states.length - 1) {
    context.strokeStyle = "#d9dee5";
    context.lineWidth = 1;
    context.strokeRect(x + 1.5, y + gap + 0.5, WIDTH - 3, height - 2 * gap - 1);
  }
  if (mark === SOME_RANK) {
    context.fillStyle = RED;
    context.beginPath();
    context.moveTo(x + WIDTH - 1, y + gap);
    context.lineTo(x + WIDTH - 1, y + height - gap);
    context.lineTo(x + 5, y + gap);
    context.fill();
  }
}

function showCell(event, kind, top, height) {
  const tip = document.getElementById("tip");
  const column = Math.floor((event.offsetX - LEFT) / WIDTH), rank = Math.floor((event.offsetY - top) / height);
  const cell = kind.cells[rank] && kind.cells[rank][column];
  tip.hidden = !cell;
  if (!cell) return;
  const [op, module] = kind.columns[column];
  const failed = ["", "\na check failed here on at least one rank", "\na check failed here on this rank"][cell[3]];
  const place = kind.layers.length ? ` of layer ${kind.layers[0]}` : "";
  tip.textContent = `rank ${data.ranks[rank]}: ${data.words[op]} in ${data.words[module]}${place}\n` +
    `${data.words[cell[1]]}\n${data.words[cell[2]]}${failed}`.trim();
  tip.style.left = Math.min(event.pageX + 14, window.scrollX + document.documentElement.clientWidth - 400) + "px";
  tip.style.top = event.pageY + 16 + "px";
}

function legend() {
  const items = data.states.map((name, i) => [name, {background: STATE_COLOURS[i]}]);
  const box = make("div", {class: "legend"}, ...items.map(([name, style]) =>
    make("span", {}, make("i", {style}), name)));
  box.append(make("span", {}, make("i", {style: {background: RED}}), "a check failed on this rank"));
  const half = `linear-gradient(to top right, ${STATE_COLOURS[0]} 50%, ${RED} 50%)`;
  box.append(make("span", {}, make("i", {style: {background: half}}), "a check failed here, on some rank"));
  box.append(make("span", {}, make("i", {style: {border: "2px solid #1f2933"}}), "collective"));
  return box;
}

function drawMap() {
  const box = section("Layout map", "map",
    make("p", {class: "soft"}, "Each column is an op in the order it runs, each row a rank; the colour says how the value " +
      "that the op leaves lies over the tp ranks. Layers that are alike on every rank are drawn once. Point at a cell for its shapes."),
    legend());
  let cells = 0;
  for (const step of data.steps) {
    const numbers = step.steps.length > 1 ? `steps ${step.steps[0]} to ${step.steps[step.steps.length - 1]}` : `step ${step.steps[0]}`;
    const requests = step.requests.map(([query, context]) => `${query}${context ? " after " + context : ""}`);
    const shown = requests.length > 8 ? `${requests.slice(0, 8).join(", ")} \u2026 (${requests.length})` : requests.join(", ");
    if (data.steps.length > 1 || step.steps.length > 1) {
      box.append(make("h3", {}, `${numbers}: ${step.phase}, plan ${step.plan}, requests ${shown}`));
    }
    const row = make("div", {class: "kinds"});
    for (const kind of step.kinds) {
      row.append(make("div", {class: "kind"}, make("h3", {}, kindTitle(kind)), drawKind(kind)));
      cells += kind.cells.length * kind.columns.length;
    }
    box.append(row);
  }
  document.body.dataset.cells = cells;
}
