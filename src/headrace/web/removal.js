// Deletes a conversation. It can be restored for a few seconds; then it is removed here and on the server. If the
// page was closed meanwhile, the next visit removes it.

import { ask } from "./api.js";
import { forgetDraft } from "./composer.js";
import * as store from "./store.js";
import { toast, UNDO_MS } from "./toast.js";
import { forgetTyped } from "./typed.js";

// `letGo` stops the follower of a message, by its id. `back` is called with the id of a restored conversation.
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
  // It was restored.
  if (await store.conversation(id)) return;
  for (const { id: message, stream, earlier = [] } of await store.messagesOf(id)) {
    letGo(message);
    forgetTyped(message);
    forgetTyped(`edit-${message}`);
    for (const one of [...earlier, stream].filter(Boolean)) ask(`/v1/streams/${encodeURIComponent(one)}`, { method: "DELETE" }).catch(() => {});
  }
  forgetDraft(id);
  await store.removeConversation(id);
}
