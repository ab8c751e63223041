//! The examples of each command of `kubectl kpx`.

/// The examples by command: a command line, and what it is for.
pub const EXAMPLES: &[(&str, &[(&str, &str)])] = &[
    (
        "status",
        &[
            ("kubectl kpx status", "See whether all nodes are well"),
            (
                "kubectl kpx status -w",
                "The same, and each change of a node's health or problems",
            ),
            (
                "kubectl kpx status -l k8s-app=kube-proxy",
                "Where kpx runs in kubeadm's DaemonSet",
            ),
        ],
    ),
    (
        "services",
        &[
            (
                "kubectl kpx services shop/web",
                "See whether all nodes serve a Service in the same way",
            ),
            (
                "kubectl kpx services --service-selector app=web",
                "List the Services with this label",
            ),
        ],
    ),
    (
        "backends",
        &[
            (
                "kubectl kpx backends shop/web",
                "See which pods take new connections, and of which nodes",
            ),
            (
                "kubectl kpx backends --service-namespace shop --sort-by state",
                "Those without traffic first",
            ),
            (
                "kubectl kpx backends shop/web -w",
                "The same for each node, and each change",
            ),
        ],
    ),
    (
        "flows",
        &[
            (
                "kubectl kpx flows --service shop/web",
                "List the connections to a Service on all nodes",
            ),
            (
                "kubectl kpx flows --node n1 --node n2 --sort-by client",
                "List those of two nodes by client",
            ),
        ],
    ),
    (
        "events",
        &[
            (
                "kubectl kpx events",
                "See what the agents had to say, the newest last",
            ),
            (
                "kubectl kpx events shop/web -w",
                "The same of a Service, and each new Event of each node",
            ),
        ],
    ),
    (
        "top",
        &[
            (
                "kubectl kpx top --sort unserved",
                "Watch which Services refuse most, on all nodes together",
            ),
            (
                "kubectl kpx top --filter shop/ --by-node --once",
                "Print the traffic of each node once",
            ),
        ],
    ),
    (
        "monitor",
        &[
            (
                "kubectl kpx monitor --unserved",
                "Show what is dropped or rejected on any node",
            ),
            (
                "kubectl kpx monitor --service shop/web --since 5m --count 50",
                "Begin with the packets of the past",
            ),
        ],
    ),
    (
        "trace",
        &[
            (
                "kubectl kpx trace --from pod/shop/cart-0 --to svc/shop/web",
                "Say what becomes of a pod's connection, on the node of that pod",
            ),
            (
                "kubectl kpx trace --from 203.0.113.9 --to 192.0.2.1:30080 --node n1",
                "The same of a client outside, whose packets come to n1",
            ),
        ],
    ),
    (
        "connectivity-test",
        &[
            (
                "kubectl kpx connectivity-test",
                "Try every kind of Service on two nodes",
            ),
            (
                "kubectl kpx connectivity-test --node n1 --node n7 -o json",
                "On these, for a program",
            ),
        ],
    ),
    (
        "sysdump",
        &[
            ("kubectl kpx sysdump", "Gather a bug report of all nodes"),
            (
                "kubectl kpx sysdump --node n1 -o /tmp/n1.tar.gz",
                "Of one node, in this file",
            ),
        ],
    ),
];
