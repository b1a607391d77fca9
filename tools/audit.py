"""Redo a run from what it left behind, with plain torch and nothing of atoll: from version 0, the kept contributions,
the tape and the step logs every merge and outer step up to the hash of model/, every clock and quorum, every book and
every figure of summary.json (docs/ARITHMETIC.md, docs/SUMMARY.md). What lacks a step log is named, the rest is checked.
Exit: 0 equal, 1 not equal, 2 it cannot be read."""
import hashlib
import json
import math
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

BLOCK, CANCELLED = 65536, 2.0**-20

class Differs(Exception): ...

def must(ok, *words):
    if not ok:
        raise Differs(" ".join(map(str, words)))

def close(a, b, *words):
    same = a == b or (isinstance(a, (int, float)) and b is not None and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9))
    must(same, *words, f"recounted {a}, recorded {b}")

def read_tensors(path):
    must(path.exists(), path, "is missing")
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118

def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()[:32]

def norm(x):
    squares = x.double() * x.double()
    blocks = torch.nn.functional.pad(squares, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    while (half := blocks.shape[1] // 2) > 0:
        blocks = blocks[:, :half] + blocks[:, half:]
    return math.sqrt(add(blocks[:, 0].tolist()))

def add(floats):
    total = 0.0
    for value in floats:
        total = total + value
    return total

def weighted_sum(deltas, coefficients):
    first, *rest = (delta.double() * c for delta, c in zip(deltas, coefficients))
    return sum(rest, start=first)

def rda(deltas, shares):
    norms = [norm(d) for d in deltas]
    d = weighted_sum(deltas, [s / n if n else 0.0 for s, n in zip(shares, norms)])
    m, length = add(share * n for share, n in zip(shares, norms)), norm(d)
    return torch.zeros(len(d)) if length < CANCELLED else (d * (m / length)).float()

def merge(deltas, weights, layout, method):
    """Of the tensors of a layout that the deltas have: those after them are buffers."""
    shares, parts, start = [w / add(weights) for w in weights], [], 0
    for _, size, averaged in layout:
        cut = [d[start : start + size] for d in deltas]
        if start == len(deltas[0]):
            break
        plain = method == "average" or averaged
        parts.append(weighted_sum(cut, shares).float() if plain else rda(cut, shares))
        start += size
    return torch.cat(parts)

def payload_digest(theta, trained, payload):
    """Parameters in the payload's format, buffers in fp32."""
    parts = theta[:trained].to(payload).view(torch.uint8), theta[trained:].view(torch.uint8)
    return digest(torch.cat(parts))

def nesterov(theta, momentum, delta, lr, mu):
    lr, mu = torch.tensor([lr, mu], dtype=torch.float32)
    momentum = momentum * mu + delta
    return theta - (delta + momentum * mu) * lr, momentum

class Run:
    def __init__(self, directory):
        self.dir = Path(directory)
        *whole, _ = (self.dir / "tape.jsonl").read_text().split("\n")  # the last one is empty, or torn
        self.lines = [json.loads(text) for text in whole]
        must([x["i"] for x in self.lines] == list(range(len(self.lines))), "lines of the tape are missing")
        self.run, self.set = self.lines[0], self.lines[0]["settings"]
        must(self.run["kind"] == "runline" and self.run["schema"] == 1, "the tape does not begin with schema 1")
        self.P, self.s = self.set["fragments"], self.set["interval"] // self.set["fragments"]
        self.trained = self.run["piece_sizes"]
        self.last = next((x["slot"] for x in self.kind("phaseline") if x["phase"] == "draining"), None)
        if not self.kind("startline") and any(x["phase"] == "over" for x in self.kind("phaseline")):
            raise OSError("it was stopped before its first slot, and nothing was merged")
        must(self.last is not None, "the run did not come to its finish")
        self.ends = {(x["name"], x["generation"]): x for x in self.kind("lifeendline")}

    def kind(self, name):
        return [x for x in self.lines if x["kind"] == name]

def redo_merges(run):
    """Every merge from version 0; returns the final theta of each piece and the merged tokens per life and piece."""
    kept, payload = run.dir / "contributions", {"bf16": torch.bfloat16, "fp32": torch.float32}[run.set["payload"]]
    seeds = [read_tensors(kept / f"version-0/piece-{p:04d}.safetensors")[0]["theta"] for p in range(run.P)]
    theta, momentum = list(seeds), [torch.zeros_like(t) for t in seeds]
    told = run.kind("seedline")[0]["update_hashes"]
    must([payload_digest(t, n, payload) for t, n in zip(theta, run.trained)] == told, "version 0 differs")
    version, slot_of, seen, made, merged = [(1, 0)] * run.P, [0] * run.P, set(), [], defaultdict(int)
    for line in run.kind("slotline"):
        slot, p = line["slot"], line["piece"]
        must(p == slot % run.P and slot > slot_of[p], f"slot {slot} is out of order")
        must(tuple(line["base"]) == version[p], f"slot {slot} starts from version {line['base']}, not {version[p]}")
        slot_of[p], version[p] = slot, (1, version[p][1] + bool(line["merged"]))
        must(tuple(line["version"]) == version[p], f"slot {slot} makes version {line['version']}, not {version[p]}")
        if not line["merged"]:
            continue
        ids = [(m["name"], m["generation"]) for m in line["merged"]]
        must(ids == sorted(set(ids)), f"slot {slot}: inputs are not in id order")
        n, weights = run.trained[p], [m["weight"] for m in line["merged"]]
        sent = [check_input(run, kept, slot, p, m, version[p][1] - 1, payload, seen) for m in line["merged"]]
        for m in line["merged"]:
            merged[m["name"], m["generation"], p] += m["c_tokens"]
        delta = merge([-flat for flat, _ in sent], weights, run.run["layout"][p], run.set["merge"])
        lr, mu, old = run.set["outer_lr"], run.set["outer_momentum"], momentum[p]
        stepped, buf = nesterov(theta[p][:n], old[:n], delta, lr, mu)
        buffers = weighted_sum([held for _, held in sent], [w / add(weights) for w in weights]).float()
        theta[p], momentum[p] = torch.cat((stepped, buffers)), torch.cat((buf, old[n:]))
        redone = (digest(theta[p]), digest(momentum[p]), payload_digest(theta[p], n, payload))
        told = (line["theta_hash"], line["momentum_hash"], line["update_hash"])
        must(redone == told, f"slot {slot} piece {p}: the merge gives {redone}, the tape says {told}")
        made.append((slot, p, version[p]))
    published = [(x["slot"], x["piece"], tuple(x["version"])) for x in run.kind("publishedline")]
    must(sorted(made) == sorted(published), "what was published is not what was merged")
    fates = [(x["name"], x["generation"], x["seq"]) for x in run.kind("fateline")]
    must(len(seen) + len(fates) == len(seen.union(fates)), "a contribution has two fates")
    check_model(run, theta, version)
    return merged, len(made)

def check_input(run, kept, slot, p, m, base_n, payload, seen):
    path = kept / f"slot-{slot:08d}" / f"{m['name']}-{m['generation']}-{m['seq']}.safetensors"
    tensors, meta = read_tensors(path)
    sent, head = tensors["sent"], json.loads(meta["contribution"])["announce"]
    held = tensors.get("buffers", torch.zeros(0))
    whole = torch.cat((sent.view(torch.uint8), held.view(torch.uint8)))
    must(sent.dtype == payload and digest(whole) == m["hash"], f"{path}: bytes do not match the tape")
    told = {"piece": p, "slot": slot, **{k: m[k] for k in ("seq", "anchor", "own_step", "c_steps", "c_tokens")}}
    must({k: head[k] for k in told} == told, f"{path}: header {head} does not match the tape")
    must(m["weight"] == m["c_tokens"] * (m["c_tokens"] / m["c_steps"]) > 0, f"{path}: weight is wrong")
    must(0 <= base_n - m["anchor"][1] <= run.set["stale_max"], f"{path}: anchor {m['anchor']} is stale")
    key, flat = (m["name"], m["generation"], m["seq"]), sent.float()
    finite = bool(torch.isfinite(flat).all() and torch.isfinite(held).all())
    must(key not in seen and finite, f"{path}: merged twice or not finite")
    seen.add(key)
    close(norm(flat), m["norm"], f"{path}: norm")
    return flat, held

def check_model(run, theta, version):
    tensors, _ = read_tensors(run.dir / "model/model.safetensors")
    manifest = json.loads((run.dir / "model/manifest.json").read_text())
    floats = sum(tensor.is_floating_point() for tensor in tensors.values())
    must(floats == sum(map(len, run.run["layout"])), "model/ has other tensors than the layout")
    for p, rows in enumerate(run.run["layout"]):
        flat = torch.cat([tensors[name].reshape(-1) for name, _, _ in rows])
        must(digest(flat) == digest(theta[p]), f"model/ differs from the merges in piece {p}")
        row = manifest["pieces"][p]
        must(row["theta_hash"] == digest(flat) and tuple(row["version"]) == version[p], f"manifest of piece {p}")
        files = [read_tensors(path) for path in (run.dir / "commits").glob(f"{p:04d}.[ab]")]
        heads = [(tuple(json.loads(meta["commit"])["version"]), digest(held["theta"])) for held, meta in files]
        must(max(heads) == (version[p], digest(theta[p])), f"the newest commit of piece {p} is not the final one")

def check_pace(run):
    """Clocks from reports, quorums from clocks, waits from the tape (R2, R3, R5)."""
    conf, locked = run.set, run.set["mode"] != "decoupled"
    clock, steps, state, back, reached, quorum = {}, {}, {}, {}, 0, {}
    for x in run.lines:
        life, ready = (x.get("name"), x.get("generation")), [k for k, v in state.items() if v == "ready"]
        heard = [life] if x.get("before") == "away" else list(clock) if x["kind"] == "oversleptline" else []
        back |= dict.fromkeys(heard, x.get("now_ns", 0) + conf["heartbeat_interval_ns"])
        if x["kind"] == "grantline":
            clock[life], steps[life] = reached * run.s, 0
        elif x["kind"] == "memberline":
            must(state.get(life, "joining") == x["before"], f"line {x['i']}: {life} was {state.get(life)}")
            state[life] = x["state"]
        elif x["kind"] == "reportline":
            new, steps[life] = x["steps"] - steps[life], x["steps"]
            low, high = reached * run.s, (reached + 1) * run.s
            clock[life] = low if life in back else min(max(clock[life] + new, low), high)
            must(new >= 0 and x["clock"] == clock[life], f"line {x['i']}: clock is {x['clock']}, not {clock[life]}")
            back = {k: until for k, until in back.items() if k != life or x["now_ns"] < until}
        elif x["kind"] == "quorumline":
            needed = len(ready) if locked else max(1, min(conf["quorum"] or (len(ready) + 1) // 2, len(ready)))
            must((x["slot"], x["needed"], x["ready"]) == (reached + 1, needed, len(ready)), f"quorum of {x['slot']}")
            votes = sum(clock[k] >= x["slot"] * run.s for k in ready)
            must(locked or votes >= needed, f"slot {x['slot']} had {votes} of {needed} clocks")
            window = conf["overlap"] * x["step_ns"] - x["quorum_wait_ns"] - x["sync_ns"]
            grace = max(0, min(conf["grace_factor"] * window, x["step_ns"] - 1))
            must(x["grace_ns"] == 0 or abs(grace - x["grace_ns"]) <= 4, f"grace of slot {x['slot']}: {x} {grace}")
            reached, quorum[x["slot"]] = x["slot"], x
        elif x["kind"] == "closedline":
            must(x["ready"] == len(ready), f"slot {x['slot']}: {len(ready)} were ready")
            who, grace = {(n, g) for n, g, _ in x["participants"]}, quorum.get(x["slot"], {"grace_ns": 0})["grace_ns"]
            waited = x["waited_ns"] >= grace or x["reason"].startswith("the next slot")
            must(set(ready) <= who if x["reason"].startswith("all ready") else waited, f"slot {x['slot']} closed early")
    return reached

def check_books(run, merged):
    """Books of every life; returns lives without a step log, whose steps nobody can count again, and untold steps."""
    unlogged, untold = [], {}
    for (name, generation), end in run.ends.items():
        log = run.dir / f"steps/{name}-{generation}.jsonl"
        told = [x for x in run.kind("reportline") if (x["name"], x["generation"]) == (name, generation)] + [end]
        for a, b in zip(told, told[1:]):
            must(a["steps"] <= b["steps"] and a["tokens"] <= b["tokens"], f"{name}: counters run backwards to {b}")
        if log.exists():
            untold[f"{name}-{generation}"] = check_log(log, {x["steps"]: x for x in told})
        elif end["steps"]:
            unlogged.append(f"{name}-{generation}")
        for p, (m, o, lost) in enumerate(zip(end["merged"], end["overwritten"], end["lost"])):
            must(m == merged.pop((name, generation, p), 0), f"{name}: merged tokens of piece {p}")
            must(m + o + lost == end["tokens"] and lost >= 0, f"{name}: fates of piece {p} do not add up")
    must(not merged, f"merged work of lives without books: {dict(merged)}")
    return unlogged, {life: steps for life, steps in untold.items() if steps}

def check_log(log, told):
    """What the syncer was told after so many steps is the sum of the rows; returns how many rows came after that."""
    rows, tokens, loss = [json.loads(x) for x in log.read_text().splitlines()], 0, 0.0
    must(max(told) <= len(rows), f"{log} has {len(rows)} steps, the syncer heard of {max(told)}")
    for n, row in enumerate(rows, 1):
        tokens, loss = tokens + row["tokens"], loss + row["tokens"] * row["loss"]
        x = told.get(n, {"tokens": tokens, "loss_sum": loss})
        same = tokens == x["tokens"] and math.isclose(loss, x["loss_sum"], rel_tol=1e-5)
        must(row["step"] == n and same, f"{log}: step {n} is not as told: {tokens} tokens, loss sum {loss}")
    return len(rows) - max(told)

def recount(run):
    ends, sizes, out = run.ends.values(), run.run["piece_sizes"], {}
    books = {f: [sum(e[f][p] for e in ends) for p in range(run.P)] for f in ("merged", "overwritten", "lost")}
    books |= {"computed": [sum(e["tokens"] for e in ends)] * run.P, "pending": [0] * run.P}
    out |= {name: run.set[name] for name in ("mode", "seed")}
    out |= {"learners": len({name for name, _ in run.ends}), "expected_learners": run.set["learners"]}
    out["slots"] = max((x["slot"] for x in run.kind("closedline") if x["slot"] <= run.last), default=0)
    out["steps"], out["work_ratio"] = out["slots"] * run.s, None
    out["token_pieces"] = {f: sum(row) for f, row in books.items()}
    out["tokens"] = {f: sum(z * n for z, n in zip(sizes, row)) / sum(sizes) for f, row in books.items()}
    out["yield"] = sum(books["merged"]) / sum(books["computed"])
    out["wall_s"] = (run.lines[-1]["now_ns"] - run.lines[0]["now_ns"]) / 1e9
    span = (run.kind("reportline")[-1]["now_ns"] - run.kind("reportline")[0]["now_ns"]) / 1e9
    out["tokens_per_s"] = books["computed"][0] / span
    waits = [(cause, ns) for e in ends for cause, ns in e["blocked_ns"]]
    out["blocked_s"] = {c: sum(ns for w, ns in waits if w == c) / 1e9 for c in ("parameters", "lock", "finish")}
    fates = [x["fate"] for x in run.kind("fateline")]
    out["contributions"] = {"missed": fates.count("missed"), "refused": fates.count("refused")}
    out["step_max_s"] = max(e["step_ns_max"] for e in ends) / 1e9
    out["train_loss"], out["training_uptime"] = train_loss_and_uptime(run, span)
    return out | {"merge_uptime": merge_uptime(run), "participation": participation(run)}

def participation(run):
    state, closed, shares, by_piece, by_name = {}, {}, [], defaultdict(list), defaultdict(list)
    published = {x["slot"] for x in run.kind("publishedline")}
    for x in run.lines:
        if x["kind"] == "memberline":
            state[x["name"], x["generation"]] = x["state"]
        elif x["kind"] == "closedline":
            closed[x["slot"]] = (x["ready"], {n for (n, _), v in state.items() if v == "ready"})
        elif x["kind"] == "slotline" and x["slot"] <= run.last and (not x["merged"] or x["slot"] in published):
            (ready, names), who = closed[x["slot"]], {m["name"] for m in x["merged"]}
            if ready:
                shares.append(min(1.0, len(who) / ready))
                by_piece[x["piece"]].append(shares[-1])
            for name in names | who:
                by_name[name].append(float(name in who))
    out = {"mean": sum(shares) / len(shares)}
    for what, rows in (("fragment", by_piece), ("learner", by_name)):
        value, name = min((sum(row) / len(row), name) for name, row in rows.items())
        out[f"lowest_{what}"] = {what: name, "value": value}
    return out

def train_loss_and_uptime(run, span_s):
    last, rows, pace, spans = {}, [], {}, []
    for x in (x for x in run.lines if x["kind"] in ("reportline", "lifeendline")):
        life = (x["name"], x["generation"])
        steps, tokens, loss, at = last.get(life, (0, 0, 0.0, None))
        if x["kind"] == "reportline" and x["steps"] > steps and at is not None:
            new, ns = x["steps"] - steps, x["now_ns"] - at
            t, n = pace.get(life, (0, 0))
            ns = min(ns, max(run.set["lease_interval_ns"], 4 * new * t // n)) if n else ns
            pace[life] = (t + ns, n + new)
            spans.append((x["now_ns"] - ns, x["now_ns"]))
        rows.append((x["tokens"] - tokens, x["loss_sum"] - loss))
        last[life] = (x["steps"], x["tokens"], x["loss_sum"], x["now_ns"] if x["kind"] == "reportline" else at)
    total, wanted = 0.0, 0.1 * sum(t for t, _ in rows)
    left = wanted
    for tokens, loss in reversed([r for r in rows if r[0] > 0]):
        part = min(1.0, max(0.0, left / tokens))
        total, left = total + part * loss, left - part * tokens
    stepping, end = 0, -math.inf
    for start, stop in sorted(spans):
        stepping, end = stepping + max(0, stop - max(start, end)), max(end, stop)
    return total / wanted, stepping / 1e9 / span_s

def merge_uptime(run):
    start = run.kind("startline")[0]["now_ns"]
    marks = [x["now_ns"] for x in run.kind("publishedline") if x["slot"] <= run.last]
    if not marks:
        return 0.0
    stop = max(next(x["now_ns"] for x in run.kind("phaseline") if x["phase"] == "draining"), marks[-1])
    limit, points = 10 * (marks[-1] - start) / len(marks), [start, *marks, stop]
    return 1 - sum(b - a for a, b in zip(points, points[1:]) if b - a > limit) / (stop - start)

def compare(recounted, recorded, where="summary"):
    for name, value in recounted.items():
        must(name in recorded, f"{where} lacks {name}")
        (compare if isinstance(value, dict) else close)(value, recorded[name], f"{where}.{name}")

def main(directory):
    if not any((Path(directory) / "contributions").iterdir()):
        raise OSError("no contributions in it: it ran without --keep-contributions")
    run = Run(directory)
    with open(run.dir / "run.toml", "rb") as file:
        must(tomllib.load(file) == run.set, "run.toml is not what the run began with, which is on the tape")
    (merged, merges), slots = redo_merges(run), check_pace(run)
    unlogged, untold = check_books(run, merged)
    compare(recount(run), summary := json.loads((run.dir / "summary.json").read_text()))
    known = "equal as far as it was logged" if unlogged else "all equal"
    print(f"audit: {known}: {merges} merges redone to the hash of model/, {slots} quorums, {len(run.ends)} lives,")
    print(f"audit: yield {summary['yield']:.4f} and all other figures as in summary.json")
    if untold:
        lives = ", ".join(f"{steps} of {life}" for life, steps in sorted(untold.items()))
        print(f"audit: steps after the last report of a life that was cut off, which are in no figure: {lives}")
    if unlogged:
        print(f"audit: NOT counted again, but taken as reported: steps, tokens and losses of {', '.join(unlogged)};")
        print(f"audit: {run.dir / 'steps'} lacks their step logs (atoll.join(steps_dir=...), or a learner's own --run)")

if __name__ == "__main__":
    try:
        main(*sys.argv[1:2] or [""])
    except Differs as error:
        sys.exit(f"audit: FAILED: {error}")
    except OSError as error:
        print(f"audit: cannot read the run ({error}); use: audit.py RUN_DIR, of a run with kept contributions")
        sys.exit(2)
    except (IndexError, KeyError, TypeError, ValueError, StopIteration, RecursionError, SafetensorError) as error:
        sys.exit(f"audit: FAILED: a record is damaged: {type(error).__name__} {error}")
