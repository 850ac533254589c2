/** What is not there although nothing is damaged: not saved, or not read yet. */
export function Notes({ texts }: { texts?: string[] }) {
  return (
    <>
      {texts?.map((text) => (
        <p key={text} class="note">
          {text}
        </p>
      ))}
    </>
  );
}
