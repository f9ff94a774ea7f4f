// Prints nothing; writes the seccomp filters that a sandbox and its gofer install, compiled, as Go code.
//
// gVisor's own build does this with Bazel; a build by Go alone leaves it out, and then every start
// compiles its filter again, 14 ms of CPU. Run inside gVisor's module: go run ./precompile SENTRY GOFER
package main

import (
	"fmt"
	"os"
	"strings"

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	sentry "gvisor.dev/gvisor/runsc/boot/filter/config"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter/config"
)

// What no sandbox of ours is started with.
var unused = []string{
	"CgoEnabled=true", "HostNetwork=true", "NVProxy=true", "TPUProxy=true", "RDMAProxy=true",
	"UDSOpenEnabled=true", "UDSCreateEnabled=true",
}

func used(name string) bool {
	for _, option := range unused {
		if strings.Contains(name, option) {
			return false
		}
	}
	return true
}

func write(file string, compile func() ([]precompiledseccomp.Program, error)) error {
	programs, err := compile()
	if err != nil {
		return err
	}
	var code strings.Builder
	for _, program := range programs {
		if used(program.Name) {
			code.WriteString(program.Registration("\t", "precompiledseccomp", "programs"))
		}
	}
	return os.WriteFile(file, []byte(code.String()), 0o600)
}

func main() {
	err := write(os.Args[1], sentry.PrecompiledPrograms)
	if err == nil {
		err = write(os.Args[2], gofer.PrecompiledPrograms)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
