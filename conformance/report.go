package conformance

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Outcome is how a check ended.
type Outcome string

const (
	Passed Outcome = "passed"
	Failed Outcome = "failed"
	// Skipped is a check that does not apply to the driver; the reason is in the message.
	Skipped Outcome = "skipped"
	// Known is a failure that the profile lists as known.
	Known Outcome = "known failure"
	// Fixed is a check that passed although the profile lists it as a known failure.
	Fixed Outcome = "fixed"
)

// Result is one check and how it ended.
type Result struct {
	Check   string  `json:"check"`
	Level   Level   `json:"level"`
	Outcome Outcome `json:"outcome"`
	// Messages say what is wrong, or why the check was skipped.
	Messages []string `json:"messages,omitempty"`
	// Notes are no judgement: how long something takes, for example.
	Notes []string `json:"notes,omitempty"`
	// Evidence is in order of time.
	Evidence []Evidence    `json:"evidence,omitempty"`
	Duration time.Duration `json:"-"`
}

// Evidence is something that shows what happened: a request, a response, files, lines of a log.
type Evidence struct {
	Title string `json:"title"`
	Text  string `json:"text"`
}

// Report is the results of a run.
type Report struct {
	Driver     string `json:"driver"`
	Kubernetes string `json:"kubernetes"`
	// Duration is left out of what is written, so that reports can be compared.
	Duration time.Duration `json:"-"`
	Results  []Result      `json:"results"`
	// Rights are what the driver may do at the API server and what it has done.
	Rights []Right `json:"rights,omitempty"`
}

// Conforms is true if no MUST check failed.
func (r *Report) Conforms() bool {
	for _, result := range r.Results {
		if result.Level == Must && result.Outcome == Failed {
			return false
		}
	}
	return true
}

// Count returns how many checks ended so.
func (r *Report) Count(outcome Outcome) int {
	n := 0
	for _, result := range r.Results {
		if result.Outcome == outcome {
			n++
		}
	}
	return n
}

// WriteTable writes a table for people: every check, and below it what is wrong with those that failed.
func (r *Report) WriteTable(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "CHECK\tLEVEL\tRESULT\tTIME")
	for _, result := range r.Results {
		fmt.Fprintf(table, "%s\t%s\t%s\t%.1fs\n", result.Check, result.Level, result.Outcome, result.Duration.Seconds())
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, result := range r.Results {
		if len(result.Notes) > 0 {
			fmt.Fprintf(w, "\n%s notes\n", result.Check)
		}
		for _, note := range result.Notes {
			fmt.Fprintf(w, "  %s\n", note)
		}
	}
	for _, result := range r.Results {
		if result.Outcome == Passed || len(result.Messages) == 0 {
			continue
		}
		fmt.Fprintf(w, "\n%s (%s): %s\n", result.Check, result.Level, result.Outcome)
		for _, message := range result.Messages {
			fmt.Fprintf(w, "  %s\n", strings.ReplaceAll(message, "\n", "\n  "))
		}
		if result.Outcome == Failed {
			fmt.Fprintf(w, "  More: dra-conformance explain %s\n", result.Check)
		}
	}
	if err := r.writeRights(w); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%s with Kubernetes %s: %d passed, %d failed, %d known failures, %d skipped, in %s\n", r.Driver, r.Kubernetes,
		r.Count(Passed)+r.Count(Fixed), r.Count(Failed), r.Count(Known), r.Count(Skipped), r.Duration.Round(time.Second))
	return err
}

// writeRights writes what the driver has used of what it was granted.
func (r *Report) writeRights(w io.Writer) error {
	if len(r.Rights) == 0 {
		return nil
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "\nAPI RESOURCE\tVERB\tGRANTED\tUSED")
	word := func(yes bool) string {
		if yes {
			return "yes"
		}
		return "no"
	}
	for _, right := range r.Rights {
		used := word(right.Used)
		if right.Refused {
			used = "refused"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", right.Resource, right.Verb, word(right.Granted), used)
	}
	return table.Flush()
}

// WriteJSON writes all results. Two runs of the same driver with the same outcome differ in their evidence and notes only.
func (r *Report) WriteJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(r)
}

type junitSuite struct {
	XMLName  xml.Name    `xml:"testsuite"`
	Name     string      `xml:"name,attr"`
	Tests    int         `xml:"tests,attr"`
	Failures int         `xml:"failures,attr"`
	Skipped  int         `xml:"skipped,attr"`
	Time     string      `xml:"time,attr"`
	Cases    []junitCase `xml:"testcase"`
}

type junitCase struct {
	ClassName string        `xml:"classname,attr"`
	Name      string        `xml:"name,attr"`
	Time      string        `xml:"time,attr"`
	Failure   *junitMessage `xml:"failure,omitempty"`
	Skipped   *junitMessage `xml:"skipped,omitempty"`
	Output    string        `xml:"system-out,omitempty"`
}

type junitMessage struct {
	Message string `xml:"message,attr"`
	Type    string `xml:"type,attr,omitempty"`
	Text    string `xml:",chardata"`
}

// WriteJUnit writes the results as JUnit XML. Known failures are skipped tests there, with their reason.
func (r *Report) WriteJUnit(w io.Writer) error {
	suite := junitSuite{
		Name: "dra-conformance " + r.Driver, Tests: len(r.Results), Failures: r.Count(Failed),
		Skipped: r.Count(Skipped) + r.Count(Known), Time: fmt.Sprintf("%.3f", r.Duration.Seconds()),
	}
	for _, result := range r.Results {
		area, name, _ := strings.Cut(result.Check, "/")
		test := junitCase{ClassName: area, Name: name, Time: fmt.Sprintf("%.3f", result.Duration.Seconds())}
		message := strings.Join(result.Messages, "\n")
		first, _, _ := strings.Cut(message, "\n")
		switch result.Outcome {
		case Failed:
			test.Failure = &junitMessage{Message: first, Type: string(result.Level), Text: message}
		case Skipped, Known:
			test.Skipped = &junitMessage{Message: message, Type: string(result.Outcome)}
		}
		for _, note := range result.Notes {
			test.Output += note + "\n"
		}
		for _, evidence := range result.Evidence {
			test.Output += "--- " + evidence.Title + "\n" + evidence.Text + "\n"
		}
		suite.Cases = append(suite.Cases, test)
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	encoder := xml.NewEncoder(w)
	encoder.Indent("", "  ")
	if err := encoder.Encode(suite); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}
