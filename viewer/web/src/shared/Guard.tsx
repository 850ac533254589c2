import { Component, type ComponentChildren } from "preact";
import { Problem } from "./Problem";

/** A page that fails says why; the header and the other pages stay. */
export class Guard extends Component<{ children: ComponentChildren }, { text: string | null }> {
  state = { text: null };

  static getDerivedStateFromError(error: Error) {
    return { text: `this page failed: ${error.message}` };
  }

  render() {
    return this.state.text === null ? this.props.children : <Problem text={this.state.text} />;
  }
}
