import sys, time, torch, random
import torch.distributed as dist
from statistics import median, mean
from shoal.bench.calibration import check
from shoal.bench.calibration.measure import _model, REFERENCE
from shoal.comm.pool import Pool
from shoal.catalog import tables
from shoal.catalog.clusters import nodes
from shoal.layout import Layout
from shoal.plan.estimate import Estimate
from shoal.train.allocator import tune_allocator
tables.add("/tmp/me/here.toml")
L=[Layout(micro_batch=6),Layout(dp=2,micro_batch=6),Layout(dp=2,micro_batch=3,zero=2,recompute="selective"),Layout(tp=2,micro_batch=12),Layout(tp=2,micro_batch=3),Layout(tp=2,micro_batch=1),Layout(tp=2,sequence_parallel=True,micro_batch=6),Layout(pp=2,micro_batch=6),Layout(pp=3,micro_batch=4),Layout(dp=2,tp=2,micro_batch=3)]
def reference(repeats):
    layers, hidden, tokens = REFERENCE
    model, ids = _model(layers, hidden), torch.randint(2048, (tokens // 128, 128))
    model(ids, ids).backward()
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        model(ids, ids).backward()
        seconds.append(time.perf_counter() - begin)
    return seconds
if __name__=="__main__":
    ref=nodes()["here"].reference
    with Pool(4,tune_allocator) as pool:
        found={}
        def last(n):
            r=pool.run(reference,n,3); return median(max(e) for e in zip(*r))/ref, mean(sum(e)/n for e in r[0:1] for e in [[x] for x in r[0]])/ref
        for turn in range(int(sys.argv[1])):
            for i,l in enumerate(L):
                n=min(2,l.world_size)
                b=last(n)[0]
                r=pool.run(check._steps,l.world_size,l,2)
                a=last(n)[0]
                for e in zip(*r): found.setdefault(i,[]).append((max(e),(a+b)/2))
        for i,l in enumerate(L):
            e=Estimate(check.run_of(l,"here"))
            m=median(x[0] for x in found[i]); s=median(x[1] for x in found[i]); q=median(x[0]/x[1] for x in found[i])
            print(f"{l.describe():40s} mb{l.micro_batch} {l.recompute} raw {m*1e3:.0f} slower {s:.2f} norm {q*1e3:.0f} est {e.step_seconds*1e3:.0f} off {e.step_seconds/q-1:+.2f}", {k:round(v*1e3) for k,v in e.breakdown.items() if v>1e-3}, [f"{x[0]*1e3:.0f}/{x[1]:.2f}" for x in found[i]])
