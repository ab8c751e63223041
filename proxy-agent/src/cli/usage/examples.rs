//! The examples of each command.

/// A command line, and what it is for.
pub(super) type Example = (&'static str, &'static str);

/// The examples by command. Those of the parts of `cluster` are in proxy-cluster.
pub(super) const EXAMPLES: &[(&str, &[Example])] = &[
    (
        "run",
        &[
            (
                "kpx run --config /var/lib/kube-proxy/config.conf",
                "Serve a node by the configuration of its kube-proxy",
            ),
            (
                "kpx run --mode host --kubeconfig /etc/kpx/kubeconfig",
                "Reach ClusterIPs and names from a machine outside",
            ),
            (
                "kpx run --manifests ./services --node-name n1",
                "Serve Services from a folder, without an API server",
            ),
            (
                "kpx run --monitor-history=50000",
                "Keep packets of the past for `kpx monitor --since`",
            ),
            (
                "kpx run --backend-health on",
                "Lead new connections past backends that give no answer",
            ),
            (
                "kpx run --local-redirect",
                "Let pods of the client's node answer for Services that name them",
            ),
            (
                "kpx run --kubernetes-version 1.40",
                "Take defaults as kube-proxy of that version does",
            ),
        ],
    ),
    (
        "status",
        &[
            (
                "kpx status",
                "See whether this node is well, and what is dropped and rejected",
            ),
            (
                "kpx status -o json",
                "The same for a program: .healthy, .problems, .reasons",
            ),
            ("watch -n1 kpx status", "The same again each second"),
        ],
    ),
    (
        "services",
        &[
            ("kpx services -A", "List the Services of all namespaces"),
            (
                "kpx services -n shop -l app=web,tier!=cache",
                "List those of a namespace with these labels",
            ),
            (
                "kpx services shop/web -o wide",
                "See which addresses of a Service are in force",
            ),
            (
                "kpx services --sort-by unserved -o name",
                "Name those that refuse most first",
            ),
        ],
    ),
    (
        "backends",
        &[
            (
                "kpx backends shop/web",
                "See which pods of a Service take new connections",
            ),
            (
                "kpx backends shop/web -w",
                "The same, and each change as it comes",
            ),
            (
                "kpx backends shop/web -o wide",
                "The same with weights and connect times",
            ),
            (
                "kpx backends -l app=web -o json",
                "The backends of Services with this label, for a program",
            ),
        ],
    ),
    (
        "flows",
        &[
            (
                "kpx flows --service shop/web",
                "List the connections to a Service",
            ),
            (
                "kpx flows --client 10.244.1.7 --state new",
                "List what a client opens in vain",
            ),
            (
                "kpx flows --client 10.244.1.7 --end",
                "End all that a client has open",
            ),
        ],
    ),
    (
        "devices",
        &[(
            "kpx devices",
            "See which devices carry programs, and which are pods'",
        )],
    ),
    (
        "events",
        &[
            (
                "kpx events",
                "See what the agent had to say, the newest last",
            ),
            (
                "kpx events shop/web -w",
                "The same of a Service, and each new Event as it comes",
            ),
            (
                "kpx events -n shop -o json",
                "The Events of a namespace for a program",
            ),
        ],
    ),
    (
        "top",
        &[
            ("kpx top", "Watch the traffic of each Service; q ends it"),
            ("kpx top shop/web", "Watch the backends of one Service"),
            (
                "kpx top -l app=web --once --sort unserved",
                "Print once which Services with this label refuse most",
            ),
            (
                "kpx top -n shop -o json",
                "The traffic of a namespace for a program",
            ),
        ],
    ),
    (
        "trace",
        &[
            (
                "kpx trace --from pod/shop/cart-0 --to svc/shop/web:http",
                "Say what becomes of a pod's connection, and why",
            ),
            (
                "kpx trace --from 203.0.113.9 --to 192.0.2.1:30080 --in-device eth0",
                "The same of a client outside, by a node port",
            ),
        ],
    ),
    (
        "monitor",
        &[
            (
                "kpx monitor --unserved",
                "Show what is dropped or rejected, as it happens",
            ),
            (
                "kpx monitor --service shop/web --count 10",
                "Show the next ten packets that open connections to a Service",
            ),
            (
                "kpx monitor --since 5m --no-follow",
                "Show those of the last minutes, where kpx runs with --monitor-history",
            ),
        ],
    ),
    (
        "explain",
        &[
            (
                "kpx explain no_endpoints",
                "Say what a reason means, and what to do",
            ),
            ("kpx explain -o json", "List all reasons for a program"),
        ],
    ),
    (
        "sysdump",
        &[
            ("kpx sysdump", "Gather a bug report of this node"),
            (
                "kpx sysdump -o /tmp/kpx.tar.gz --flows",
                "The same with the addresses of clients",
            ),
        ],
    ),
    (
        "cluster",
        &[
            ("kubectl kpx status", "See whether all nodes are well"),
            (
                "kpx cluster --context prod trace --from pod/shop/cart-0 --to svc/shop/web",
                "Trace on the node of the pod",
            ),
            (
                "kubectl kpx connectivity-test",
                "Try every kind of Service with pods of its own",
            ),
        ],
    ),
    (
        "check",
        &[
            ("kpx check", "See whether this host is fit, before kpx runs"),
            (
                "kpx check --kubeconfig /etc/kpx/kubeconfig",
                "Look at a kubeconfig as well",
            ),
            (
                "kpx check --mode host --context prod --tunnel tcp",
                "The same for a machine outside, and such a run",
            ),
        ],
    ),
    (
        "cleanup",
        &[
            ("kpx cleanup", "Take kpx off a host for good"),
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
            "See whether the running agent is of this program's version",
        )],
    ),
    (
        "completions",
        &[(
            "kpx completions bash",
            "Print what /etc/bash_completion.d/kpx may hold",
        )],
    ),
    (
        "man",
        &[(
            "kpx man --dir /usr/local/share/man/man1",
            "Write a page for each command",
        )],
    ),
];
