//! The examples of each command of `kubectl kpx`.

/// The examples by command: a command line, and its purpose.
pub const EXAMPLES: &[(&str, &[(&str, &str)])] = &[
    (
        "status",
        &[
            ("kubectl kpx status", "Show the health of all nodes"),
            (
                "kubectl kpx status -w",
                "Follow changes of health and problems",
            ),
            (
                "kubectl kpx status -l k8s-app=kube-proxy",
                "For a kpx in kubeadm's kube-proxy DaemonSet",
            ),
        ],
    ),
    (
        "services",
        &[
            (
                "kubectl kpx services shop/web",
                "Compare a Service across nodes",
            ),
            (
                "kubectl kpx services --service-selector app=web",
                "List Services by label",
            ),
        ],
    ),
    (
        "backends",
        &[
            (
                "kubectl kpx backends shop/web",
                "Show which pods take new connections, from which nodes",
            ),
            (
                "kubectl kpx backends --service-namespace shop --sort-by state",
                "List backends without traffic first",
            ),
            (
                "kubectl kpx backends shop/web -w",
                "Follow changes per node",
            ),
        ],
    ),
    (
        "flows",
        &[
            (
                "kubectl kpx flows --service shop/web",
                "List connections to a Service on all nodes",
            ),
            (
                "kubectl kpx flows --node n1 --node n2 --sort-by client",
                "List flows of two nodes by client",
            ),
        ],
    ),
    (
        "events",
        &[
            ("kubectl kpx events", "Show recent events of all nodes"),
            (
                "kubectl kpx events shop/web -w",
                "Follow the events of a Service",
            ),
        ],
    ),
    (
        "top",
        &[
            (
                "kubectl kpx top --sort unserved",
                "Watch Services by unserved packets, summed over nodes",
            ),
            (
                "kubectl kpx top --filter shop/ --by-node --once",
                "Print the traffic per node, once",
            ),
        ],
    ),
    (
        "monitor",
        &[
            (
                "kubectl kpx monitor --unserved",
                "Follow dropped and rejected packets of all nodes",
            ),
            (
                "kubectl kpx monitor --service shop/web --since 5m --count 50",
                "Start with past packets",
            ),
        ],
    ),
    (
        "trace",
        &[
            (
                "kubectl kpx trace --from pod/shop/cart-0 --to svc/shop/web",
                "Explain the path of a pod's connection on its node",
            ),
            (
                "kubectl kpx trace --from 203.0.113.9 --to 192.0.2.1:30080 --node n1",
                "Explain the path of an external client that enters at n1",
            ),
        ],
    ),
    (
        "ui",
        &[
            (
                "kubectl kpx ui",
                "Serve the page of the cluster at http://127.0.0.1:10290/ui/",
            ),
            (
                "kubectl kpx ui --port 0 --node n1 --node n7",
                "Serve a page of two nodes at any free port",
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
                "Test these nodes, print JSON",
            ),
            (
                "kubectl kpx connectivity-test --external-forwarding",
                "Test also whether the network carries external forwarding's packets",
            ),
        ],
    ),
    (
        "sysdump",
        &[
            ("kubectl kpx sysdump", "Write a bug report of all nodes"),
            (
                "kubectl kpx sysdump --node n1 -o /tmp/n1.tar.gz",
                "Write a bug report of one node to this file",
            ),
        ],
    ),
    (
        "version",
        &[
            (
                "kubectl kpx version",
                "Compare the versions of all nodes with this program's",
            ),
            (
                "kubectl kpx version --node n1",
                "Show the version of one node",
            ),
        ],
    ),
];
