"""An environment of verifiers 0.4.0, as its documentation writes them: a task with a reward, and a
tool server.

Run by verifiers_env.py; nothing here knows of training.  (A Toolset is started as `python -m` its
module.)
"""

from __future__ import annotations

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "calculator"

    @vf.tool
    def multiply(self, a: float, b: float) -> float:
        """Multiply two numbers."""
        return a * b


class ProductConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ProductData(vf.TaskData):
    answer: str


class Product(vf.Task[ProductData, vf.State, ProductConfig]):
    @classmethod
    def toolsets(cls, config: ProductConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)]

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


if __name__ == "__main__":
    Calculator.run()
