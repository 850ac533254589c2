// Scrolling further than a browser's largest element: a million rows are 34 million pixels, Firefox ends at 17.

export const MAX_PIXELS = 8_000_000;

/** Virtual position of a list of `height` pixels inside an element of at most MAX_PIXELS. */
export class ScrollPosition {
  position = 0;
  private lastTop = 0;

  constructor(
    private height: number,
    private view: number,
  ) {}

  get elementHeight(): number {
    return Math.min(this.height, MAX_PIXELS);
  }

  resize(height: number, view: number): void {
    this.height = height;
    this.view = view;
    this.position = Math.min(this.position, this.end);
  }

  /** The element was scrolled to `top`.  Small moves are exact; a drag of the bar moves in proportion. */
  scrolled(top: number): number {
    const move = top - this.lastTop;
    this.lastTop = top;
    const elementEnd = this.elementHeight - this.view;
    if (this.height <= MAX_PIXELS) this.position = top;
    else if (top <= 0) this.position = 0;
    else if (top >= elementEnd - 1) this.position = this.end;
    else if (Math.abs(move) <= 2 * this.view) this.position += move;
    else this.position = (top / elementEnd) * this.end;
    this.position = Math.max(0, Math.min(this.end, this.position));
    return this.position;
  }

  /** Where the element has to be scrolled to show `position`. */
  topOf(position: number): number {
    this.position = Math.max(0, Math.min(this.end, position));
    const top =
      this.height <= MAX_PIXELS ? this.position : (this.position / this.end) * (this.elementHeight - this.view);
    this.lastTop = Math.round(top);
    return this.lastTop;
  }

  private get end(): number {
    return Math.max(0, this.height - this.view);
  }
}
