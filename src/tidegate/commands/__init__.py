"""What `tidegate` can do at the command line: one module per command or group of commands.

A command reads its options, calls the part of the project that does the work, and shows the outcome to a
person or a pipe. It decides nothing about messages, and it imports what it starts lazily, so that
`tidegate pub` does not load the broker.

May import: everything; of `pipeline`, at the top, only `status`. May touch sockets and files.

    broker     broker, up
    pipeline   pipeline run, pipeline status, pipeline stop
    config     config check, config show; the options that fill the configuration for all others
    publish    pub
    subscribe  sub
    trace      trace
    log        log list, log dump, log verify
    sessions   sessions
    sql        sql
    replay     replay
    mqtt       the connection that pub, sub and trace share, and the options for it
    subscription  what sub and trace do with it: subscribe, and connect again
    spark      the session that sql and replay use, and its progress
    text       payloads and times as safe, readable text
    failure    the one way in which a command fails
"""
