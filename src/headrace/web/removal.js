// A conversation that is deleted can be brought back for a moment. Then all of it goes, here and on
// the server; if the page was lost meanwhile, at its next start.

import { ask } from "./api.js";
import { forgetDraft } from "./composer.js";
import * as store from "./store.js";
import { toast, UNDO_MS } from "./toast.js";
import { forgetTyped } from "./typed.js";

// `letGo` ends whatever follows a message, by its id; `back` is called with one that came back.
export async function remove(conversation, letGo, back) {
  await store.changeConversation(conversation.id, { deleted: Date.now() });
  const undo = async () => {
    await store.changeConversation(conversation.id, { deleted: undefined });
    back(conversation.id);
  };
  toast(`Deleted “${conversation.title}”.`, { undo, settle: () => purge(conversation.id, letGo) });
}

export async function purgeDeleted(letGo) {
  for (const { id, deleted } of await store.deletedConversations()) setTimeout(() => purge(id, letGo), deleted + UNDO_MS - Date.now());
}

async function purge(id, letGo) {
  if (await store.conversation(id)) return; // it came back
  for (const { id: message, stream, earlier = [] } of await store.messagesOf(id)) {
    letGo(message);
    forgetTyped(message);
    forgetTyped(`edit-${message}`);
    for (const one of [...earlier, stream].filter(Boolean)) ask(`/v1/streams/${encodeURIComponent(one)}`, { method: "DELETE" }).catch(() => {});
  }
  forgetDraft(id);
  await store.removeConversation(id);
}
