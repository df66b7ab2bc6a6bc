// The head of the page, then its parts.
function drawHead() {
  const main = document.querySelector("main");
  main.append(make("div", {class: "top"},
    make("h1", {}, data.title),
    make("span", {class: `badge ${data.verdict}`, id: "verdict"}, data.verdict)));
  main.append(make("dl", {class: "facts"}, ...data.head.map(([key, value]) =>
    make("div", {}, make("dt", {}, key), make("dd", {}, value)))));
  if (data.verdict === "unfinished") {
    main.append(make("div", {class: "failure"}, make("h3", {}, "The run did not finish"),
      make("p", {}, "There is no summary.json beside the traces: a rank failed. The map shows how far each rank came. Last finished:"),
      ...data.last.map(({ranks, op, module}) => make("p", {}, `${ranks}: ${op} of ${module}`))));
  }
  drawFailure(main);
  main.append(make("ul", {class: "checks"}, ...data.checks.map(check =>
    make("li", {class: check.passed ? "" : "bad"}, make("b", {}, check.name), `: ${check.detail}`))));
  const {max_abs_error, max_rel_error, max_error_in_tolerances} = data.errors;
  if (max_abs_error !== null && max_abs_error !== undefined) {
    const short = value => value && value < 1e-3 ? value.toExponential(1) : value.toPrecision(2);
    main.append(make("p", {class: "soft"}, `Largest error ${short(max_abs_error)} absolute, ` +
      `${short(max_rel_error)} of the reference's largest value, ${short(max_error_in_tolerances)} tolerances.`));
  }
}

function fieldsText(value) {
  if (value === null || typeof value !== "object") return String(value);
  return Object.entries(value).map(([key, field]) => `${key} ${Array.isArray(field) ? shapeText(field) : field}`).join(", ");
}

function drawFailure(main) {
  const first = data.first_failure, culprit = data.culprit;
  if (!first && !culprit) return;
  const box = make("div", {class: "failure"});
  const add = (title, rows) => {
    const lines = rows.map(([key, value]) => make("tr", {}, make("th", {}, key), make("td", {}, fieldsText(value))));
    box.append(make("h3", {}, title), make("table", {}, make("tbody", {}, ...lines)));
  };
  if (first) {
    add("First broken boundary", [
      ["module", first.module + (first.port ? ` (${first.port})` : "")], ["rank", first.rank], ["step", first.step],
      ["expected", first.expected], ["found", first.found], ["detail", first.detail],
    ]);
  }
  if (culprit) {
    add("First node with right inputs and a wrong output", [
      ["node", `${culprit.node} (${culprit.op}) of ${culprit.module}`], ["ranks", culprit.ranks.join(", ")],
      ["cause", `${culprit.kind}: ${culprit.text}`],
    ]);
  }
  main.append(box);
}

drawHead();
drawMap();
drawTime();
drawCollectives();
drawBoundaries();
drawMemory();
document.body.dataset.milliseconds = Math.round(performance.now());
