"""The endpoint with agents of other packages, unmodified: conversations of several turns with a
tool, every sampled token learned from once, and none tokenized again.

Their versions are those of requirements-clients.txt: make test-clients.
"""

import asyncio
import importlib.util
import json
import re
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.fake_server import FakeServer
from tests.unit.rollout.test_endpoint import (
    MULTIPLY,
    TOKENIZER,
    USER,
    chat_sample,
    check_every_token_once,
    sample,
    spans,
)

QUESTION = "3*2?"
ROOT = Path(__file__).resolve().parents[3]


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: the first factor
        b: the second factor
    """
    return float(a * b)


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} is not installed: make test-clients"
    )


def check_inputs_as_recorded(server, rollout):
    """Every turn was sampled for exactly the tokens before it: those of earlier turns as they were
    sampled.
    """
    inputs = sorted(tuple(request["input_ids"][0]) for request in server.requests)
    before = sorted(
        tuple(sequence.tokens[:start].tolist())
        for sequence in rollout.sequences
        for start, _, _ in spans(sequence)
    )
    assert inputs == before


def run_agent(function, reply=None):
    source = chat_sample if reply is None else lambda *args: chat_sample(*args, reply=reply)
    with FakeServer("ok", source=source) as server:
        rollout, counters = sample(server, function, max_tokens=3000, longest=20_000)
        check_every_token_once(server, rollout)
        check_inputs_as_recorded(server, rollout)
    assert (counters.tool_errors, counters.unread_turns) == (0, 0)
    return rollout, counters


async def runs_litellm(session, prompt):
    import litellm

    endpoint = await session.open_endpoint()
    settings = {
        "model": "openai/policy", "api_base": endpoint.base_url, "api_key": endpoint.api_key,
        "tools": [MULTIPLY], "num_retries": 0,
    }  # fmt: skip
    messages = []
    for _ in range(2):
        messages.append(USER)
        while True:
            answer = await litellm.acompletion(messages=messages, **settings)
            message = answer.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            (call,) = message.tool_calls
            result = str(multiply(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert message.content == "It is 6.0"
    return session.finish(1.0)


async def runs_langchain(session, prompt):
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    endpoint = await session.open_endpoint()
    model = ChatOpenAI(model="policy", base_url=endpoint.base_url, api_key=endpoint.api_key)
    served = tool(multiply)
    bound, messages = model.bind_tools([served]), []
    for _ in range(2):
        messages.append(HumanMessage(QUESTION))
        messages.append(await bound.ainvoke(messages))
        while messages[-1].tool_calls:
            messages += [await served.ainvoke(call) for call in messages[-1].tool_calls]
            messages.append(await bound.ainvoke(messages))
        assert messages[-1].content == "It is 6.0"
    return session.finish(1.0)


async def runs_langgraph(session, prompt):
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    endpoint = await session.open_endpoint()
    model = ChatOpenAI(model="policy", base_url=endpoint.base_url, api_key=endpoint.api_key)
    agent, messages = create_react_agent(model, [multiply]), []
    for _ in range(2):
        state = await agent.ainvoke({"messages": [*messages, USER]})
        messages = state["messages"]
        assert messages[-1].content == "It is 6.0"
    return session.finish(1.0)


async def runs_pydantic_ai(session, prompt):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    endpoint = await session.open_endpoint()
    provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
    agent = Agent(OpenAIChatModel("policy", provider=provider), tools=[multiply])
    first = await agent.run(QUESTION)
    second = await agent.run(QUESTION, message_history=first.all_messages())
    assert first.output == second.output == "It is 6.0"
    return session.finish(1.0)


async def runs_openai_agents(session, prompt):
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

    endpoint = await session.open_endpoint()
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        agent = Agent("calculator", model=model, tools=[function_tool(multiply)])
        quiet = RunConfig(tracing_disabled=True)
        first = await Runner.run(agent, QUESTION, run_config=quiet)
        second = await Runner.run(agent, [*first.to_input_list(), USER], run_config=quiet)
        assert first.final_output == second.final_output == "It is 6.0"
    return session.finish(1.0)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(runs_litellm, marks=needs("litellm")),
        pytest.param(runs_langchain, marks=needs("langchain_openai")),
        pytest.param(runs_langgraph, marks=needs("langgraph", "langchain_openai")),
        pytest.param(runs_pydantic_ai, marks=needs("pydantic_ai")),
        pytest.param(runs_openai_agents, marks=needs("agents")),
    ],
)
def test_a_conversation_with_a_tool_is_one_sequence(function, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    rollout, counters = run_agent(function)
    assert (len(rollout.sequences), rollout.num_spans, counters.tool_calls) == (1, 4, 2)


async def streams_responses(session, prompt):
    from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool

    endpoint = await session.open_endpoint()
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        model = OpenAIResponsesModel("m", client)
        tools = [function_tool(multiply)]
        agent = Agent("calculator", instructions="be brief", model=model, tools=tools)
        quiet = RunConfig(tracing_disabled=True)
        first = await Runner.run(agent, QUESTION, run_config=quiet)
        assert first.final_output == "It is 6.0"
        history = [*first.to_input_list(), USER]
        streamed = Runner.run_streamed(agent, history, run_config=quiet)
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds and streamed.final_output == "It is 6.0"
        last = await Runner.run(
            agent, "more", previous_response_id=streamed.last_response_id, run_config=quiet
        )
        assert last.final_output == "It is 6.0"
    return session.finish(1.0)


@needs("agents")
def test_responses_of_openais_agents_are_one_sequence():
    """The default model class of openai-agents: items again, a stream, previous_response_id."""
    rollout, counters = run_agent(streams_responses)
    assert (len(rollout.sequences), rollout.num_spans, counters.tool_calls) == (1, 6, 3)


async def writes_prompts_with_litellm(session, prompt):
    import litellm

    endpoint = await session.open_endpoint()
    text = QUESTION
    for _ in range(3):
        answer = await litellm.atext_completion(
            model="text-completion-openai/policy", prompt=text, max_tokens=200,
            api_base=endpoint.base_url, api_key=endpoint.api_key,
        )  # fmt: skip
        text += f"{answer.choices[0].text}<|im_end|>{QUESTION}"
    return session.finish(1.0)


async def writes_prompts_with_langchain(session, prompt):
    from langchain_openai import OpenAI

    endpoint = await session.open_endpoint()
    model = OpenAI(
        model="policy", base_url=endpoint.base_url, api_key=endpoint.api_key, temperature=1.0,
        max_tokens=200,
    )  # fmt: skip
    text = QUESTION
    for _ in range(3):
        text += f"{await model.ainvoke(text)}<|im_end|>{QUESTION}"
    return session.finish(1.0)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(writes_prompts_with_litellm, marks=needs("litellm")),
        pytest.param(writes_prompts_with_langchain, marks=needs("langchain_openai")),
    ],
)
def test_prompts_of_text_are_one_sequence(function, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    rollout, _ = run_agent(function, lambda conversation: f"answer {conversation.count('?')}")
    assert (len(rollout.sequences), rollout.num_spans) == (1, 3)
    between = [TOKENIZER.decode(rollout.tokens[a:b]) for a, b in rollout.environment]
    assert between == [QUESTION, QUESTION]


def ends_with_a_call(conversation):
    """Calls for each question multiply, and then smolagents' final_answer."""
    call = {"name": "multiply", "arguments": {"a": 3, "b": 2}}
    if "Observation:" in conversation.rsplit(QUESTION, 1)[1]:
        call = {"name": "final_answer", "arguments": {"answer": "6.0"}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


async def runs_smolagents(session, prompt):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    endpoint = await session.open_endpoint()
    model = OpenAIServerModel("policy", api_base=endpoint.base_url, api_key=endpoint.api_key)
    agent = ToolCallingAgent([tool(multiply)], model, verbosity_level=0, max_steps=4)
    for reset in (True, False):
        answer = await asyncio.to_thread(agent.run, QUESTION, reset=reset)
        assert answer == "6.0"
    return session.finish(1.0)


@needs("smolagents")
def test_an_agent_that_rewrites_its_history_has_a_sequence_for_each_turn():
    rollout, counters = run_agent(runs_smolagents, ends_with_a_call)
    assert (len(rollout.sequences), counters.tool_calls) == (4, 4)
    assert [sequence.num_spans for sequence in rollout.sequences] == [1] * 4


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 6.0"


def runs_commands(conversation):
    """Two commands, and the one with which mini-swe-agent ends."""
    is_last = conversation.count("<output>") == 2
    call = {"name": "bash", "arguments": {"command": SUBMIT if is_last else "expr 3 '*' 2"}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


async def runs_mini_swe_agent(session, prompt):
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    endpoint = await session.open_endpoint()
    access = {"api_base": endpoint.base_url, "api_key": endpoint.api_key}
    model = LitellmModel(
        model_name="openai/policy", model_kwargs=access, cost_tracking="ignore_errors"
    )
    templates = {"system_template": "be brief", "instance_template": "{{task}}"}
    agent = DefaultAgent(model, LocalEnvironment(), **templates)
    ended = await asyncio.to_thread(agent.run, QUESTION)
    assert (ended["exit_status"], ended["submission"]) == ("Submitted", "6.0\n")
    return session.finish(1.0)


@needs("minisweagent")
def test_an_agent_with_a_shell_is_one_sequence(monkeypatch, tmp_path):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    rollout, counters = run_agent(runs_mini_swe_agent, runs_commands)
    assert (len(rollout.sequences), rollout.num_spans, counters.tool_calls) == (1, 3, 3)
    answers = [TOKENIZER.decode(rollout.tokens[a:b]) for a, b in rollout.environment]
    assert all("<output>\n6\n</output>" in answer for answer in answers)


def test_the_guide_names_the_versions_that_are_tested():
    guide = (ROOT / "docs/guides/agents.md").read_text()
    named = re.findall(r"^\| ([a-z-]+) \| (\d+\.\d+\.\d+) \|", guide, re.MULTILINE)
    pinned = (ROOT / "requirements-clients.txt").read_text().splitlines()
    assert len(named) == 7 and {f"{name}=={version}" for name, version in named} <= {*pinned}
