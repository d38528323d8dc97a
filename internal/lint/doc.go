// Package lint holds the house rules that a machine can check, as tests. A rule
// that the build checks costs no reviewer's time. There is no code here to import:
//
//	go test ./internal/lint
//
// Every rule is a function from the module's sources to findings. Each finding
// names the place and says what to do. Beside each rule stands a small module that
// breaks it, so that a rule which stopped seeing anything fails too.
package lint
