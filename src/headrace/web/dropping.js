// Takes files that are pasted, dropped or chosen by the button.

const $ = (id) => document.getElementById(id);
const isOfFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
// Text that is dragged into a field goes there. The browser would open anything else in place of the page.
const isOurs = (event) => isOfFiles(event) || !event.target.closest?.("input, textarea");
// Copied cells of a table contain a picture of themselves. A copied file has its name as text, but no HTML.
const isText = (given) => given.types.includes("text/html") && given.getData("text/plain").trim();

// `take` is called with the files of each paste, drop or choice.
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
