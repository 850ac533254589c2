import { useEffect, useRef } from "preact/hooks";

const KEYS: [string, string][] = [
  ["Left, Right", "token before, token after"],
  ["Up, Down", "token above, token below (in the text)"],
  ["Home, End", "first, last token"],
  ["n, p", "next, previous flipped token (else: clipped one)"],
  ["j, k", "next, previous response of the group"],
  ["c, C", "next, previous quantity"],
  ["Escape", "nothing chosen"],
  ["?", "these keys"],
];

export function KeyHelp({ onClose }: { onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} aria-label="Keys" onClose={onClose}>
      <h2>Keys</h2>
      <dl class="keys">
        {KEYS.map(([key, what]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <button type="button" onClick={() => dialog.current?.close()}>
        Close
      </button>
    </dialog>
  );
}
