// A component that is drawn again only when a prop changes.

import { Component, createElement, type FunctionComponent } from "preact";

export function memo<P extends object>(Inner: FunctionComponent<P>): FunctionComponent<P> {
  class Memo extends Component<P> {
    shouldComponentUpdate(next: P): boolean {
      const before = this.props as Record<string, unknown>;
      return Object.entries(next).some(([name, value]) => before[name] !== value);
    }

    render() {
      return createElement(Inner, this.props as P);
    }
  }
  return Memo as unknown as FunctionComponent<P>;
}
