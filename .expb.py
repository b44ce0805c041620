import sys, time, torch
from statistics import median
import shoal.comm.progress as P
from shoal.bench.calibration import check
from shoal.comm.pool import Pool
from shoal.layout import Layout
from shoal.train.allocator import tune_allocator
L=[Layout(tp=2,micro_batch=4),Layout(tp=2,micro_batch=1),Layout(dp=2,zero=3,micro_batch=3),Layout(pp=2,schedule="zb-v",micro_batch=2)]
V=eval(sys.argv[2])
def steps(l,v):
    for k,x in v.items(): setattr(P,k,x)
    return check._steps(l,2)
if __name__=="__main__":
    with Pool(4,tune_allocator) as pool:
        found={}
        for turn in range(int(sys.argv[1])):
            for i,l in enumerate(L):
                for j,v in enumerate(V):
                    r=pool.run(steps,l.world_size,l,v)
                    found.setdefault((i,j),[]).extend(max(e) for e in zip(*r))
        for i,l in enumerate(L):
            print(f"{l.describe():25s}", *[f"{median(found[i,j])*1e3:.0f} ({min(found[i,j])*1e3:.0f})" for j in range(len(V))])
