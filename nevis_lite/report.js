// A click on the head of a column sorts by it, a second one the other way round; what is missing stays last.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    const key = (row) => {
      const cell = row.cells[column];
      return "value" in cell.dataset ? Number(cell.dataset.value) : cell.classList.contains("number") ? null : cell.textContent;
    };
    button.addEventListener("click", () => {
      const down = head.ariaSort === "ascending";
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      head.ariaSort = down ? "descending" : "ascending";
      const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
      const missing = (value) => value === null || value === "";
      body.replaceChildren(...original.toSorted((first, second) => {
        const [a, b] = [key(first), key(second)];
        if (missing(a) || missing(b)) return missing(a) - missing(b);
        return down ? order(b, a) : order(a, b);
      }));
    });
  });
}
