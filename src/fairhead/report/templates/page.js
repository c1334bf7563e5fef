"use strict";
// Sorting and filtering of tables of groups. The page is complete without it.
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0], given = [...body.rows];
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const before = heading.getAttribute("aria-sort");
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      // First descending, then ascending, then as it was.
      const turn = before === "descending" ? 1 : before === "ascending" ? 0 : -1;
      if (turn) heading.setAttribute("aria-sort", turn < 0 ? "descending" : "ascending");
      const key = row => {
        const cell = row.cells[column];
        return cell.dataset.order === undefined ? cell.textContent : cell.dataset.order === "" ? NaN : Number(cell.dataset.order);
      };
      const compare = (a, b) => {
        const x = key(a), y = key(b);
        if (typeof x === "string") return -turn * x.localeCompare(y);
        return Number.isNaN(x) - Number.isNaN(y) || turn * (x - y);
      };
      body.append(...(turn ? [...given].sort(compare) : given));
    });
  });
}
for (const block of document.querySelectorAll(".block")) {
  const rows = [...block.querySelectorAll("table[data-sortable] tbody tr")];
  const first = block.querySelector("table[data-sortable]");
  if (!first || first.tBodies[0].rows.length <= 8) continue;
  const label = document.createElement("label"), input = document.createElement("input");
  label.className = "filter";
  label.append("Only groups that hold ", input);
  input.type = "search";
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });
  first.parentElement.before(label);
}
// The threshold of a score: each group's counts at each step are in the page.
for (const sweep of document.querySelectorAll(".sweep")) {
  const steps = sweep.dataset.thresholds.split(" "), rows = [...sweep.querySelectorAll("tbody tr")];
  const numbers = rows.map(row => ["true", "false"].map(side => row.dataset[side].split(" ").map(Number)));
  const control = document.createElement("label"), input = document.createElement("input"), shown = document.createElement("output");
  control.className = "control";
  Object.assign(input, {type: "range", min: 0, max: steps.length - 1, value: sweep.dataset.start});
  const percent = (part, whole) => whole >= Number(sweep.dataset.least) ? (100 * part / whole).toFixed(1) : "\u2013";
  const update = () => {
    const at = Number(input.value);
    shown.textContent = steps[at];
    input.setAttribute("aria-valuetext", steps[at]);
    rows.forEach((row, i) => {
      const yes = Number(row.dataset.positives), no = Number(row.dataset.negatives);
      const hits = numbers[i][0][at], alarms = numbers[i][1][at];
      const figures = [[hits + alarms, yes + no], [hits, yes], [alarms, no], [hits, hits + alarms], [hits + no - alarms, yes + no]];
      figures.forEach(([part, whole], k) => { row.cells[k + 2].textContent = percent(part, whole); });
    });
  };
  control.append("Positive from a score of", input, shown);
  input.addEventListener("input", update);
  sweep.prepend(control);
  sweep.hidden = false;
  update();
}
