"""State, score options, descriptions of tensors and of calls: no framework, no kernel.

A call becomes more abstract on its way down.  Each record has what its readers may know:

    Call      call.py                  the tensors and the arguments of a public function; the framework reads it
    Task      task.py                  the same without data: shapes, strides, dtypes; a kernel is made from it
    Problem   problem.py               the numbers of a task that decide how fast it runs; the planner reads it
    Plan      planner/plan.py          backend, strategy and blocks, which the planner chooses for a problem
    Request   kernels/request.py       a task with its plan: what a backend compiles and launches
"""
