// Names of stages and what they do, in the server's words. The page itself knows no stage.

let told = {}; // name of a stage: what it does

export function setStageWords(words) {
  told = words ?? {};
}

/** "a_stage" -> "A stage" */
export const named = (lane) => lane.charAt(0).toUpperCase() + lane.slice(1).replaceAll("_", " ");

/** What a stage does, in a sentence; its name if the server does not say. */
export const explained = (stage) => (told[stage] ? `${named(stage)}: ${told[stage]}` : named(stage));

/** The ordinary word for a stage, where its description begins with one ("vocoder: ..."), else its name. */
export const ordinary = (stage) => (/^\w+(?=: )/.exec(told[stage] ?? "")?.[0] ?? stage).replace(/^./, (c) => c.toUpperCase());
