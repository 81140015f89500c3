"""``preheat models``: list, heat, trust.

What does not belong here: finding out what state a model is in (the control plane's).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from urllib.parse import quote_plus

from preheat.cli.client import ask

EXAMPLES = """\
examples:
  preheat models                     the models of the running preheat, with their state
  preheat models heat NAME           bring a model that is kept cold or warm to hot
  preheat models trust model.gguf    accept a local file that has changed since its first start
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "models",
        help="list the models; heat or trust one",
        description="Lists the models of the running preheat, heats one, or accepts a local file "
        "that has changed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=_list, json=False)
    actions = parser.add_subparsers(metavar="ACTION")
    listing = actions.add_parser("list", help="list the models (the default)")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(func=_list)
    heat = actions.add_parser("heat", help="bring a model that is kept cold or warm to hot")
    heat.add_argument("name", help="the model")
    heat.set_defaults(func=_heat)
    trust = actions.add_parser(
        "trust", help="accept a local file that has changed since its first start"
    )
    trust.add_argument("path", type=Path, help="the .gguf file, or a directory that holds one")
    trust.set_defaults(func=_trust)


def _list(args: argparse.Namespace) -> int:
    models = ask("GET", "/status")["models"]
    if args.json:
        print(json.dumps(models, indent=2))
        return 0
    width = max(len("MODEL"), *(len(m["name"]) for m in models))
    print(f"{'MODEL':<{width}}  {'STATE':<8}  REPLICAS READY")
    for model in models:
        ready = sum(r["state"] == "ready" for r in model["replicas"])
        print(f"{model['name']:<{width}}  {model['state']:<8}  {ready} of {len(model['replicas'])}")
    return 0


def _heat(args: argparse.Namespace) -> int:
    ask("POST", f"/heat?model={quote_plus(args.name)}")
    print(f"{args.name} is being heated; see `preheat status --watch`")
    return 0


def _trust(args: argparse.Namespace) -> int:
    from preheat.acceleration.weights.baselines import trust
    from preheat.core.paths import default_paths

    baseline = trust(args.path, default_paths().state)
    print(f"{baseline.path} is trusted as it is now: SHA-256 {baseline.sha256}")
    return 0
