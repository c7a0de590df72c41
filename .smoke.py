import torch, onlinesoftmax as osm
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.core.operations import OPERATIONS
from onlinesoftmax.core.task import Choice
from onlinesoftmax.torch.prepare import run

torch.manual_seed(0)
for name in ("softmax", "log_softmax", "logsumexp"):
    for st, (r, c) in {"row": (64, 3000), "cluster": (16, 50257), "grid": (3, 1 << 20), "looped": (64, 70001)}.items():
        for dt in (torch.bfloat16, torch.float32, torch.float64):
            x = (torch.randn(r, c, device="cuda") * 3).to(dt)
            try:
                got = run(
                    Call(OPERATIONS[name], x, Settings(-1, None, False, Choice("cuda", st))),
                    ("y", "lse", "m", "l", "entropy"),
                )
            except Exception as e:
                print(name, st, dt, "ERR", type(e).__name__, str(e)[:300])
                continue
            d = x.double()
            lse = torch.logsumexp(d, -1)
            p = torch.softmax(d, -1)
            ent = lse - (p * d).sum(-1)
            m = d.amax(-1)
            l = (d - m[:, None]).exp().sum(-1)
            y = getattr(torch, name)(d, -1)
            e = [(a.double() - b).abs().max().item() for a, b in zip(got, (y, lse, m, l, ent))]
            z = getattr(osm, name)(x, -1, backend="cuda", strategy=st)
            print(name, st, str(dt)[6:], ["%.1e" % v for v in e], torch.equal(z, got[0]))
