// Stores the files of unsent messages, by the names of their drafts. They have a database of their own, so that
// the one with the conversations need not change.

const opened = new Promise((resolve, reject) => {
  const asked = indexedDB.open("headrace-drafts", 1);
  asked.onupgradeneeded = () => asked.result.createObjectStore("files");
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

async function transact(mode, work) {
  const transaction = (await opened).transaction("files", mode);
  const asked = work(transaction.objectStore("files"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export const keptFiles = async (name) => (await transact("readonly", (all) => all.get(name))) ?? [];
export const keepFiles = (name, files) => transact("readwrite", (all) => (files.length ? all.put(files, name) : all.delete(name)));
