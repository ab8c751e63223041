// Package genuine pins the packages of Kubernetes' end-to-end tests, which `go test -c` builds.
package genuine

import _ "k8s.io/kubernetes/test/e2e"
