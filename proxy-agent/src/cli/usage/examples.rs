//! The examples of each command.

/// A command line, and its purpose.
pub(super) type Example = (&'static str, &'static str);

/// The examples by command. proxy-cluster has the examples of the subcommands of `cluster`.
pub(super) const EXAMPLES: &[(&str, &[Example])] = &[
    (
        "run",
        &[
            (
                "kpx run --config /var/lib/kube-proxy/config.conf",
                "Serve a node with kube-proxy's configuration",
            ),
            (
                "kpx run --mode host --kubeconfig /etc/kpx/kubeconfig",
                "Reach ClusterIPs and DNS names from outside the cluster",
            ),
            (
                "kpx run --manifests ./services --node-name n1",
                "Serve Services from a folder, without an API server",
            ),
            (
                "kpx run --monitor-history=50000",
                "Keep past packets for `kpx monitor --since`",
            ),
            (
                "kpx run --backend-health on",
                "Avoid unresponsive backends for new connections",
            ),
            (
                "kpx run --local-redirect",
                "Redirect Services to pods of the client's node",
            ),
            (
                "kpx run --kubernetes-version 1.40",
                "Use the defaults of kube-proxy 1.40",
            ),
        ],
    ),
    (
        "status",
        &[
            (
                "kpx status",
                "Show health, problems, dropped and rejected packets",
            ),
            (
                "kpx status -o json",
                "Print the same as JSON: .healthy, .problems, .reasons",
            ),
            ("watch -n1 kpx status", "Refresh every second"),
        ],
    ),
    (
        "services",
        &[
            ("kpx services -A", "List the Services of all namespaces"),
            (
                "kpx services -n shop -l app=web,tier!=cache",
                "List Services of a namespace by label",
            ),
            (
                "kpx services shop/web -o wide",
                "Show which addresses of a Service are programmed",
            ),
            (
                "kpx services --sort-by unserved -o name",
                "Show Services by rejected packets",
            ),
        ],
    ),
    (
        "backends",
        &[
            (
                "kpx backends shop/web",
                "Show which pods of a Service take new connections",
            ),
            ("kpx backends shop/web -w", "Follow changes"),
            (
                "kpx backends shop/web -o wide",
                "Show weights and connect times",
            ),
            (
                "kpx backends -l app=web -o json",
                "Print the backends of labelled Services as JSON",
            ),
        ],
    ),
    (
        "flows",
        &[
            (
                "kpx flows --service shop/web",
                "List connections to a Service",
            ),
            (
                "kpx flows --client 10.244.1.7 --state new",
                "Show a client's unanswered connections",
            ),
            (
                "kpx flows --client 10.244.1.7 --end",
                "End all flows of a client",
            ),
        ],
    ),
    (
        "devices",
        &[(
            "kpx devices",
            "Show devices with programs, and which of them are pods'",
        )],
    ),
    (
        "events",
        &[
            ("kpx events", "Show recent events"),
            ("kpx events shop/web -w", "Follow the events of a Service"),
            (
                "kpx events -n shop -o json",
                "Print the events of a namespace as JSON",
            ),
        ],
    ),
    (
        "top",
        &[
            ("kpx top", "Watch the traffic of each Service; q quits"),
            ("kpx top shop/web", "Watch the backends of one Service"),
            (
                "kpx top -l app=web --once --sort unserved",
                "Print labelled Services by unserved packets, once",
            ),
            (
                "kpx top -n shop -o json",
                "Print the traffic of a namespace as JSON",
            ),
        ],
    ),
    (
        "trace",
        &[
            (
                "kpx trace --from pod/shop/cart-0 --to svc/shop/web:http",
                "Explain the path of a pod's connection",
            ),
            (
                "kpx trace --from 203.0.113.9 --to 192.0.2.1:30080 --in-device eth0",
                "Explain the path of an external client to a node port",
            ),
        ],
    ),
    (
        "monitor",
        &[
            (
                "kpx monitor --unserved",
                "Follow dropped and rejected packets",
            ),
            (
                "kpx monitor --service shop/web --count 10",
                "Show the next ten connections to a Service",
            ),
            (
                "kpx monitor --since 5m --no-follow",
                "Show packets of the last five minutes (needs kpx run --monitor-history)",
            ),
        ],
    ),
    (
        "explain",
        &[
            ("kpx explain no_endpoints", "Explain a reason, with a fix"),
            ("kpx explain -o json", "Print all reasons as JSON"),
        ],
    ),
    (
        "sysdump",
        &[
            ("kpx sysdump", "Write a bug report of this node"),
            (
                "kpx sysdump -o /tmp/kpx.tar.gz --flows",
                "Include client addresses",
            ),
        ],
    ),
    (
        "cluster",
        &[
            ("kubectl kpx status", "Show the health of all nodes"),
            (
                "kpx cluster --context prod trace --from pod/shop/cart-0 --to svc/shop/web",
                "Trace on the pod's node",
            ),
            (
                "kubectl kpx connectivity-test",
                "Test every kind of Service with temporary pods",
            ),
        ],
    ),
    (
        "check",
        &[
            ("kpx check", "Check this host before the first run"),
            (
                "kpx check --kubeconfig /etc/kpx/kubeconfig",
                "Check a kubeconfig too",
            ),
            (
                "kpx check --mode host --context prod --tunnel tcp",
                "Check a machine outside the cluster for this configuration",
            ),
        ],
    ),
    (
        "cleanup",
        &[
            ("kpx cleanup", "Remove kpx from a host"),
            (
                "kpx cleanup --kube-proxy",
                "Remove kube-proxy's rules while kpx serves",
            ),
        ],
    ),
    (
        "version",
        &[(
            "kpx version",
            "Compare the versions of this program and of the running agent",
        )],
    ),
    (
        "completions",
        &[(
            "kpx completions bash",
            "Print the contents for /etc/bash_completion.d/kpx",
        )],
    ),
    (
        "man",
        &[(
            "kpx man --dir /usr/local/share/man/man1",
            "Write a manual page for each command",
        )],
    ),
];
