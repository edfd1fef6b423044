// On a narrow screen, custom.css shows the rows of wide tables one below the other, each cell with its heading.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const cells = [...table.querySelectorAll("tbody td")];
    const long = cells.some((cell) => cell.cellIndex > 0 && cell.textContent.trim().length > 40);
    if (headings.length < 2 || !long) continue; // numbers are compared better in columns
    table.classList.add("stackable");
    for (const cell of cells) cell.dataset.heading = headings[cell.cellIndex];
  }
});
