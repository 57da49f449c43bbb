"""Every statement of a job's life after enqueue: one module per verb, and one door that runs them.

A verb is a plain function of a Core Connection; it decides nothing (core does) and never retries
(the door does). Statements are built once per table, their text is constant, statuses stand inline
so that partial indexes match, and every statement names one queue as a constant.
"""
