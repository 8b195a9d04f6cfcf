"""Many texts in one step: texts of several calls and threads share the steps of one plan, and come and go.

A *slot* is a row of the plan (``decode.plans.rows_plan.RowsPlan``) and of its cache. Each slot has a length, a next
position and left padding of its own, which the ops of a step take by row, so a text needs no neighbor of its length.

1. A call of ``generate()`` does what it does alone: transformers prepares it, and ``decode.loops.sample`` reads its
   prompt into the call's own cache and chooses the first token.
2. If other calls of the model are under way, the call *joins*: a :class:`.member.Member` stands where the call's decode
   plan would stand. Its keys and values are copied into free slots (:class:`.slots.Slots`), and the number of slots
   grows and shrinks with the texts; the plan cache keeps a plan of each number.
3. Nobody runs steps in the background. A thread that waits for a token *leads* if no other one does
   (:class:`.sharing.Sharing`): it lets members in and out, waits a moment for members whose callbacks are at work, runs
   a step for all rows that have a token to read, and hands on what came out. A thread that has what it wants lets
   another lead.
4. Where nothing of the user's has a say in the choice of a token (greedy search, and sampling by transformers' four
   warpers), the leader chooses for the member, which may so be ahead of its own streamer and stopping criteria: a
   callback that is slow delays nobody. Otherwise the member's thread gets logits and gives a token, and its rows wait
   meanwhile. What is chosen beyond the end that a criterion finds is dropped with the slot.
5. Prompts are read one at a time and, where a prompt would take longer than a few steps, in chunks: behind each the
   rows of others have their share of the time (:class:`.prompt_turns.SharedTurns`).
6. Where memory has a limit (:class:`.room.Room`), a call waits for room before it reads its prompt, and slots are as
   small as their texts. Once these have grown beyond it, the youngest member gives up its slots. Its tokens are kept:
   its thread waits for room, reads the whole text again and joins anew, as the same member.
7. A member leaves with its call: by its end, by an exception of its own callbacks, or by being cancelled. If somebody
   reads the call's cache afterwards, the slots' keys and values are copied back there.

:func:`.engine.batch` puts a queue of requests on top: each is a call of ``generate()`` in a thread of a small pool, so
that every argument means what it means there. Requests whose prompts begin alike share what is made of their beginning
(:class:`.beginnings.Beginnings`), and those with different adapters take turns (:class:`.adapters.AdapterTurns`). A
model or call whose rows cannot be slots (``decode.loops.shared_calls.why_not_shared``) runs as without this folder, one
request after the other.
"""
