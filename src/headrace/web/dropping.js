// Files that come by paste, by drop or by the button.

const $ = (id) => document.getElementById(id);
const isOfFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
// A text that is dragged into a field goes there; all else would take the page's place.
const isOurs = (event) => isOfFiles(event) || !event.target.closest?.("input, textarea");
// Cells of a table come with a picture of themselves; a copied file has its name as text, but no HTML.
const isText = (given) => given.types.includes("text/html") && given.getData("text/plain").trim();

// `take` is called with the files of each.
export function listenForFiles(take) {
  $("attach").addEventListener("click", () => $("given").click());
  $("given").addEventListener("change", async ({ target }) => {
    await take(target.files);
    target.value = "";
  });
  $("input").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length || isText(event.clipboardData)) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
  addEventListener("dragover", (event) => {
    if (isOurs(event)) event.preventDefault();
    document.body.classList.toggle("dropping", isOfFiles(event));
  });
  addEventListener("dragleave", ({ relatedTarget }) => relatedTarget || document.body.classList.remove("dropping"));
  addEventListener("drop", (event) => {
    if (isOurs(event)) event.preventDefault();
    document.body.classList.remove("dropping");
    if (event.dataTransfer.files.length) take(event.dataTransfer.files);
  });
}
