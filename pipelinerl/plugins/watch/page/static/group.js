// A group: the problem and all its answers, side by side. Its address is permanent while the log contains it.
import { clock, number, signed, words } from "./format.js";
import { useAnswer } from "./live.js";
import { link } from "./route.js";
import { html } from "./view.js";

export function Group({ run, rest }) {
  const { value: group, error } = useAnswer(`samples/${encodeURIComponent(rest[0] ?? "")}`, { run });
  const keep = run === "0" ? {} : { run };
  const back = html`<p><a href=${link("samples", keep)}>← all samples</a></p>`;
  if (error)
    return html`${back}<p class="note warn">${error.code === "sample_gone" ? "The log keeps only the newest samples; this one has been removed." : error.message}</p>`;
  if (!group) return html`${back}<p class="none">Loading the group…</p>`;
  const kind = group.kind === "evaluation" && group.evaluation ? `evaluation ${group.evaluation}` : words(group.kind);
  return html`<div class="stack">${back}
    <section class="card"><h2>${`Problem ${group.problem_id || group.group}`} <span
      class="soft">${kind}, step ${number(group.step)}, ${clock(group.time)}</span></h2>
      ${!group.signal && html`<p><span
        class="pill warn">no signal</span> All answers have equal rewards, so the group does not train.</p>`}
      ${group.why && html`<p class="note">Not trained: ${group.why}</p>`}
      <p>${group.domain} ${group.tags.map((tag) => html`<span class="tag" key=${tag}>${tag}</span>`)}</p>
      <h3>Prompt</h3><div class="text clip" tabindex="0" role="region" aria-label="Prompt">${group.prompt}</div>
      ${group.ground_truth && html`<h3>Ground truth</h3><div class="text clip" tabindex="0" role="region"
        aria-label="Ground truth">${group.ground_truth}</div>`}</section>
    <h2>${number(group.answers.length)} answers</h2>
    <div class="answers">${group.answers.map((answer) => html`<${Answer}
      key=${answer.sample} answer=${answer} group=${group} keep=${keep} />`)}</div></div>`;
}

// The turns of an episode as a tree: a segment stands below the turn that it continues.
function Turns({ answer }) {
  const turns = answer.turns.map((turn, at) => ({ ...turn, number: at + 1 }));
  const segments = [...new Set(turns.map((turn) => turn.segment))].map((segment) =>
    turns.filter((turn) => turn.segment === segment),
  );
  const startsIn = (segment, parent) =>
    parent === null ? !segment[0].continues : parent.some((turn) => turn.number === segment[0].continues);
  const branch = (segment) => html`<li key=${segment[0].segment}>
    ${segments.length > 1 && html`<p class="soft">segment ${segment[0].segment}: ${segment[0].continues ? `continues turn ${segment[0].continues}` : "begins a conversation"}${segment[0].begins && ` (${words(segment[0].begins)})`}</p>`}
    ${segment.map(
      (turn) => html`<section key=${turn.number} aria-label=${`Turn ${turn.number} of answer ${answer.sample}`}>
      <p class="soft">turn ${turn.number}${turn.agent && turn.agent !== "main" && `, ${turn.agent}`}, ${number(turn.length)} tokens${turn.reward !== 0 && `, reward ${signed(turn.reward)}`}</p>
      ${turn.context && html`<div class="text clip context">${turn.context}</div>`}
      <div class="text clip">${turn.text || "(empty)"}</div></section>`,
    )}
    ${tree(segment)}</li>`;
  const tree = (parent) => {
    const below = segments.filter((segment) => segment !== parent && startsIn(segment, parent));
    return below.length > 0 && html`<ul class="turns">${below.map(branch)}</ul>`;
  };
  return html`<div role="region" tabindex="0" aria-label=${`Turns of answer ${answer.sample}`}>${tree(null)}</div>`;
}

function Answer({ answer, group, keep }) {
  const good = answer.outcome === "correct";
  return html`<article class="card" aria-label=${`Answer ${answer.sample}`}>
    <h3><span class=${`pill ${good ? "good" : "plain"}`}>${answer.outcome}</span> reward ${number(answer.reward)}${answer.advantage !== null && `, advantage ${signed(answer.advantage)}`}</h3>
    ${
      answer.turns.length > 0
        ? html`<${Turns} answer=${answer} />`
        : html`<div class="text clip" tabindex="0" role="region"
      aria-label=${`Text of answer ${answer.sample}`}>${answer.text || "(empty)"}</div>`
    }
    <dl class="facts-list"><dt>tokens</dt><dd>${number(answer.length)}, ended by ${answer.finish_reason || "–"}</dd>
      <dt>versions</dt><dd>${answer.spans.map(([version, count]) => `v${version} × ${count}`).join(", ") || "–"}</dd>
      <dt>staleness, 1 = on policy</dt><dd>${number(answer.staleness)}${answer.trained ? "" : ", had no gradient"}</dd>
      ${answer.parts.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${number(value)}</dd>`)}
      ${answer.shaped !== null && answer.shaped !== answer.reward && html`<dt>shaped</dt>
        <dd>${number(answer.shaped)}</dd>`}
      ${answer.reason && html`<dt>verifier</dt><dd>${answer.reason}</dd>`}</dl>
    ${answer.has_tokens ? html`<a href=${link("tokens", keep, group.group, String(answer.sample))}>Tokens</a>` : html`<span class="soft">no tokens recorded</span>`}</article>`;
}
